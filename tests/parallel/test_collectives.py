"""Collectives in one and in three real processes, joining a job, and what can be sharded."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gac import collectives
from gac.errors import ConfigError, UserError
from gac.parallel import process_group, seeds, sharding
from gac.parallel.config import ParallelConfig
from gac.rewards import RewardError
from gac.training.probes import copies
from tests import ranks


def numbers(out: str) -> tuple[Any, ...]:
    """Every collective, of values that float32 cannot hold."""
    process_group.make_accelerator(ParallelConfig(timeout=20.0), (), out)
    rank = collectives.rank()
    own = [1 + 2.0**-30 * rank, 3.0 * rank]
    return (
        collectives.total(own),
        collectives.mean(own),
        collectives.largest([*own, -rank]),
        collectives.gather({"rank": rank}),
        collectives.columns(
            {"c": (rank, 2), "max": (2.0 - rank, collectives.MAXIMUM), "none": (0.0, 0)},
            {"a": 2, f"b{rank % 2}": rank},
        ),
        collectives.all_reduce_sum(torch.tensor([2.0, rank])).tolist(),
    )


@pytest.mark.parametrize("count", [1, 3])
def test_all_ranks_get_the_same_float64_numbers(tmp_path, count: int) -> None:
    everyone = range(count)
    total = [count + 2.0**-30 * sum(everyone), 3.0 * sum(everyone)]
    expected = (
        total,
        [x / count for x in total],
        [1 + 2.0**-30 * everyone[-1], 3.0 * everyone[-1], 0.0],
        [{"rank": rank} for rank in everyone],
        {"c": (count - 1) / 4, "max": 2.0, "a": 2 * count, "b0": 2 if count == 3 else 0}
        | ({"b1": 1} if count == 3 else {}),
        [2.0 * count, sum(everyone)],
    )
    assert ranks.run(numbers, str(tmp_path), ranks=count) == [expected] * count


FAILURES = [
    ({}, False, ["returned 7"] * 2),
    ({1: UserError("x")}, False, ["x because of None"] * 2),
    ({0: UserError("x"), 1: UserError("y")}, True, [f"{x} because of None" for x in "xy"]),
    (
        {1: RewardError("x", "r", "2", "")},
        False,
        [f"{RewardError('x', 'r', '2', '')} because of None"] * 2,
    ),
    (
        {0: OSError("disk")},
        True,
        [f"explained disk because of {cause}" for cause in ("OSError('disk')", None)],
    ),
]


def seven_unless(error: Exception | None) -> int:
    if error is not None:
        raise error
    return 7


def fail(out: str) -> list[str]:
    """How `run_on_all_ranks` ends on this rank, for each of `FAILURES`."""
    process_group.make_accelerator(ParallelConfig(timeout=20.0), (), out)
    ends = []
    for failing, explained, _ in FAILURES:
        work = partial(seven_unless, failing.get(collectives.rank()))
        explain = (lambda error: UserError(f"explained {error}")) if explained else None
        try:
            ends.append(f"returned {collectives.run_on_all_ranks(work, explain)}")
        except UserError as error:
            ends.append(f"{error} because of {error.__cause__!r}")
    return ends


def test_an_error_of_one_rank_is_an_error_of_all(tmp_path) -> None:
    assert [*map(list, zip(*ranks.run(fail, str(tmp_path), ranks=2), strict=True))] == [
        expected for *_, expected in FAILURES
    ]


NOBODY = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("variables", "trackers", "message"),
    [
        (NOBODY, (), ".*timed out after 200ms"),
        ({"ACCELERATE_USE_FSDP": "True"}, (), "launch without --use_fsdp"),
        ({}, ("wandb",), "report_to='wandb' is not installed: pip install wandb"),
        ({}, ("all",), "report_to='all': use names from .*tensorboard"),
    ],
)
def test_a_job_that_cannot_start(monkeypatch, tmp_path, variables, trackers, message) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, RuntimeError), match=f"^{message}"):
        process_group.make_accelerator(ParallelConfig(timeout=0.2), trackers, str(tmp_path))


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Nested(nn.Module):
    """A layer that contains a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = Layer(), nn.Parameter(torch.zeros(2))


class Family(nn.Module):
    def __init__(self, layers: list[nn.Module], names: list[str] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.others = nn.ModuleList([nn.Identity()])
        self._no_split_modules = names


def sharded_units(out: str) -> list[Any]:
    """For each model, the names of its units and how many ranks hold each shard, or the error.

    The last entries are the errors of a job with three replicas, and of one that another launcher
    has started.
    """
    config, replicated = ParallelConfig("fsdp"), ParallelConfig("fsdp", replicas=2)
    os.environ |= {  # of `accelerate launch`
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
    }
    accelerator = process_group.make_accelerator(config, (), out)
    assert (
        accelerator.mixed_precision,
        accelerator.gradient_accumulation_steps,
        copies(torch.zeros(1)),  # the ranks that hold a plain tensor
    ) == ("no", 1, 2)
    tied = Family([Layer(), Layer()])
    tied.layers[1].weight = tied.layers[0].weight
    models = (
        Family([Layer(), Layer()]),
        Family([Nested(), Layer()], ["Nested", "Layer"]),
        Family([Nested(), Layer()], ["Nested"]),
        tied,
        nn.Sequential(nn.Linear(2, 2)),
    )
    results: list[Any] = []
    for own, model in zip((replicated, *[config] * 4), models, strict=True):
        loading = sharding.sharded_loading(accelerator, own)
        try:
            model = sharding.prepare_frozen(model, accelerator, None, loading)
            assert not any(module.training for module in model.modules())  # no dropout
        except ConfigError as error:
            results.append(str(error))
            continue
        units = {unit: name for name, unit in model.named_modules()}
        holders = {copies(p) if isinstance(p, DTensor) else 0 for p in model.parameters()}
        results.append(([units[unit] for unit in sharding.units(model)], holders))
    for own in (ParallelConfig("fsdp", replicas=3), config):
        try:
            process_group.make_accelerator(own, (), out)
        except ConfigError as error:
            results.append(str(error))
        os.environ.pop("WORLD_SIZE", None)  # as under another launcher than torchrun
    return results


@pytest.mark.dist
def test_the_outermost_layers_and_the_rest_are_sharded(tmp_path) -> None:
    *sharded, tied, without, odd, launched = ranks.run(sharded_units, str(tmp_path), ranks=2)[0]
    layers = ["layers.0", "layers.1"]
    assert sharded == [(["", *layers], {2}), (["", *layers], {1}), (["", layers[0]], {1})]
    assert tied.startswith("parallel.mode='fsdp': the layers of Family share weights")
    assert "Sequential could not be sharded (layers [], 0 unsharded parameters []" in without
    assert odd == "parallel.replicas=3: use a divisor of 2, the number of ranks"
    assert launched == "WORLD_SIZE=1, but 2 processes joined: launch with torchrun"


@pytest.mark.parametrize(("limit", "norm"), [(None, 5.0), (0.0, 5.0), (2.0, 2.0)])
def test_a_gradient_is_clipped_if_there_is_a_limit(limit: float | None, norm: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert sharding.clip_gradient(nn.Identity(), torch.optim.SGD([weight]), limit) == 5
    assert float(weight.grad.norm()) == pytest.approx(norm)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_seed_repeats_the_random_numbers(monkeypatch, has_gpu: bool) -> None:
    torch.manual_seed(17)
    first = torch.rand(3)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch, "manual_seed", torch.manual_seed if has_gpu else None)  # is slow
    seeds.seed(17)
    assert torch.equal(torch.rand(3), first)
    # with other seeds, a resumed run of this version would not repeat its random numbers
    assert seeds.derive_seed(17, 3, "sketch") == 9041650943914698
