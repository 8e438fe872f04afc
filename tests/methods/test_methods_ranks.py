"""Methods that do more than mix two losses give the same result on one process and on two."""

import pytest

from tests import ranks
from tests.parallel.test_distributed import FSDP, assert_same, config, train_steps

pytestmark = pytest.mark.dist
STEPS = 2
# each comment says what a sharded or replicated run could get wrong
METHODS = {
    "nash-mtl": {},  # inner products of gradients
    "moco": {},  # state tensors as large as the gradient
    "gradnorm-ctrl": {"update_every": 2},  # alternates joint and separate gradients
    "asft": {},  # one loss that uses the LM heads of two models
    "dpo": {},  # a rank may have no preference pair
    "sdar": {},  # a custom rollout loss, and a teacher that sees more tokens
    "dypo": {"correct": 0.4},  # groups of rollouts stay together
    "relift": {"buffer": 3, "correct": 2.0},  # all ranks share the collection
    # ranks may have different kinds of rows
    "hpt": {"table": [0.9, 0.6, 0.3, 0.1, 0.0], "correct": 0.6},
    # rows that begin with a demonstration prefix
    "trapo": {"sizes": [1, 1, 1, 1], "below": [-1, 2, 2, 2]},
    "famo": {},  # forward passes after the update
}


UNEVEN = {"dpo", "dypo", "relift", "hpt"}  # DDP differs if a rank has no rows of a kind


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_match_a_single_process(task, tmp_path, name):
    method = {"name": name, **METHODS[name]}
    changes = {"method": method, "loss": {}, "micro_batch_size": 3, "eval": {}}
    single = ranks.run(train_steps, config(task, tmp_path / "1", **changes), STEPS, ranks=1)[0]
    for parallel in (FSDP, {}) if name in UNEVEN else (FSDP,):
        two_rank_config = config(task, tmp_path / f"2 {parallel}", parallel=parallel, **changes)
        for rank in ranks.run(train_steps, two_rank_config, STEPS, ranks=2):
            assert_same(single, rank)
