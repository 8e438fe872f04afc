"""Methods that do more than mix two losses compute the same on several processes."""

from __future__ import annotations

import pytest

from . import ranks
from .test_distributed import FSDP, assert_same, config, five_steps

pytestmark = pytest.mark.dist
STEPS = 2
# why each is here: what it does that a sharded or replicated run could get wrong
METHODS = {
    "nash-mtl": {},  # inner products of gradients
    "moco": {},  # tensors of its own, as large as the gradient
    "gradnorm-ctrl": {"update_every": 2},  # joint and separate gradients in turn
    "asft": {},  # the heads of two models in one loss
    "dpo": {},  # a rank may have no pair
    "gspo": {},  # a loss of its own on rollouts
    "hpt": {"table": [0.9, 0.6, 0.3, 0.1, 0.0], "correct": 0.6},  # kinds of rows differ by rank
    "trapo": {"sizes": [1, 1, 1, 1], "below": [-1, 2, 2, 2]},  # rows that are half demonstration
    "famo": {},  # forwards after the update
}


@pytest.mark.parametrize("parallel", [{}, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("name", METHODS)
def test_two_processes_compute_what_one_does(task, tmp_path, name, parallel):
    method = {"name": name, **METHODS[name]}
    changes = {"method": method, "loss": {}, "micro_batch": 3, "eval": {}}
    one = ranks.run(five_steps, config(task, tmp_path / "1", **changes), STEPS, ranks=1)[0]
    many = config(task, tmp_path / "2", parallel=parallel, **changes)
    for rank in ranks.run(five_steps, many, STEPS, ranks=2):
        assert_same(one, rank)
