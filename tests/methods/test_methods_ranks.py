"""Methods that do more than mix two losses give the same result on one process and on two."""

import pytest

from tests import ranks
from tests.methods.published import teacher_of
from tests.parallel.test_distributed import FSDP, assert_same, config, selected, train_steps

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
    "opd": {},  # a second sharded model, and K log-probs per token
    "sdft": {"update_rate": 0.3},  # the weights are exchanged with those of a moving average
    "sdpg": {},  # the teacher's hidden states, and a head that is gathered
    "dypo": {"correct": 0.4},  # groups of rollouts stay together
    "relift": {"buffer": 3, "correct": 2.0},  # all ranks share the collection
    # ranks may have different kinds of rows
    "hpt": {"table": [0.9, 0.6, 0.3, 0.1, 0.0], "correct": 0.6},
    # rows that begin with a demonstration prefix
    "trapo": {"sizes": [1, 1, 1, 1], "below": [-1, 2, 2, 2]},
    "famo": {},  # forward passes after the update
}


UNEVEN = {"dpo", "dypo", "relift", "hpt"}  # DDP differs if a rank has no rows of a kind


@pytest.fixture(scope="module")
def results(request, task, tmp_path_factory):
    """The results of the selected methods in one process, with FSDP and, of `UNEVEN`, with DDP."""

    def run(count, names, parallel):
        changes = {"loss": {}, "micro_batch_size": 3, "eval": {}, "parallel": parallel}
        cases = {}
        for name in names:
            out, method = tmp_path_factory.mktemp(name), {"name": name, **METHODS[name]}
            keys = {"method": method, **changes, **teacher_of(name, task, out)}
            if name == "sdpg":
                keys["teacher"] |= {"top_k": None}
            cases[name] = train_steps, config(task, out, **keys), STEPS
        return ranks.run(ranks.each, cases, ranks=count)

    names = selected(request)
    return run(1, names, {}) + run(2, names, FSDP) + run(2, sorted(UNEVEN.intersection(names)), {})


@pytest.mark.parametrize("case", METHODS)
def test_two_ranks_match_a_single_process(results, case):
    single, *several = (rank[case] for rank in results if case in rank)
    assert len(several) == (4 if case in UNEVEN else 2)
    for rank in several:
        assert_same(single, rank)
