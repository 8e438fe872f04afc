"""The adapter for Trinity-RFT, against stand-ins for the few classes of Trinity that it extends."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from gac.methods import DEFAULT
from gac.methods.constant import Constant
from gac.types import Mix, Observation, State
from tests.integrations.stand_ins import modules


class Field(NamedTuple):
    source_field: str
    destination_field: str
    data_type: torch.dtype


class Algorithm:
    """Stand-in for MIXCHORDAlgorithm."""

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        return {"repeat_times": 8, "kl_loss_fn": "k2", "policy_loss_fn": "mix_chord"}

    @classmethod
    def check_config(cls, config: Any) -> None:
        config.checked = True


class PolicyLoss:
    """Stand-in for PolicyLossFn."""

    def __init__(self, backend: str) -> None:
        self.backend = backend


class Strategy:
    """Stand-in for MixSampleStrategy."""

    async def sample(self, step: int) -> Any:
        return [row(step % 2 == 0, 3)], {"step": step}, ["a row"]


CONTENTS = {
    "trinity.algorithm.algorithm": {"MIXCHORDAlgorithm": Algorithm},
    "trinity.algorithm.policy_loss_fn.policy_loss_fn": {"PolicyLossFn": PolicyLoss},
    "trinity.algorithm.sample_strategy.mix_sample_strategy": {"MixSampleStrategy": Strategy},
    "trinity.common.experience": {"CustomField": Field, "Experience": object},
}


@pytest.fixture
def trinity() -> Iterator[Any]:
    with modules(CONTENTS, "gac.integrations.trinity") as adapter:
        yield adapter


def row(expert: bool, tokens: int, length: int = 4) -> Any:
    mask = torch.arange(length) < tokens
    return SimpleNamespace(info={"is_expert": expert}, action_mask=mask, custom_fields=["own"])


def test_every_row_has_the_counts_of_its_step(trinity: Any) -> None:
    rows = [row(True, 3), *(row(False, n) for n in (2, 0, 4, 1)), row(True, 1)]
    trinity.count_rows(rows)
    counts = {"rollouts": 3, "rollout_tokens": 7, "demos": 2, "demo_tokens": 4, "rows": 6}
    fields = [Field(name, f"gac_{name}", torch.int64) for name in counts]
    for one in rows:
        assert {name: one.info[name] for name in counts} == counts
        assert one.custom_fields == ["own", *fields]
    with pytest.raises(ValueError, match="a demonstration has no completion tokens: remove"):
        trinity.count_rows([row(True, 0)])
    sampled, metrics, representatives = asyncio.run(trinity.GACSampleStrategy().sample(5))
    assert sampled[0].info["rollout_tokens"] == 3
    assert metrics == {"step": 5}
    assert representatives == ["a row"]


def configuration(**changes: Any) -> Any:
    """A valid configuration; `changes`: dotted names of its sections, with "__" for dots."""
    actor = {"ppo_epochs": 1, "ppo_mini_batch_size": 16}
    config = SimpleNamespace(
        algorithm=SimpleNamespace(
            kl_loss_fn="none", entropy_loss_fn="none", policy_loss_fn_args={"method": DEFAULT}
        ),
        trainer=SimpleNamespace(
            ulysses_sequence_parallel_size=1,
            trainer_config={"actor_rollout_ref": {"actor": actor}},
        ),
        model=SimpleNamespace(temperature=1.0),
        buffer=SimpleNamespace(train_batch_size=16),
        checkpoint_job_dir="job",
    )
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if section == "actor":
            actor[key] = value
        else:
            setattr(getattr(config, section), key, value)
    return config


@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        ("algorithm__kl_loss_fn", "k3", "'none'"),
        ("algorithm__entropy_loss_fn", "default", "'none'"),
        ("trainer__ulysses_sequence_parallel_size", 2, "1"),
        ("model__temperature", 0.7, "1.0"),
        ("actor__ppo_epochs", 2, "1"),
        ("actor__ppo_mini_batch_size", 8, "16"),
    ],
)
def test_settings_that_change_the_weighting(trinity: Any, name: str, value: Any, use: str) -> None:
    check = trinity.GACAlgorithm.check_config
    dotted = name.replace("__", ".")
    message = f"GACAlgorithm does not support {dotted}={value!r}: use {use}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        check(configuration(**{name: value}))
    check(configuration(**{name: None}))


def test_the_algorithm(trinity: Any) -> None:
    assert trinity.GACAlgorithm.default_config() == {
        "repeat_times": 8,
        "policy_loss_fn": "gac.integrations.trinity.GACPolicyLoss",
        "sample_strategy": "gac.integrations.trinity.GACSampleStrategy",
        "kl_loss_fn": "none",
        "entropy_loss_fn": "none",
    }
    check, config = trinity.GACAlgorithm.check_config, configuration()
    check(config)
    assert config.checked
    assert config.algorithm.policy_loss_fn_args == {"method": DEFAULT, "state_dir": "job"}
    config = configuration(algorithm__policy_loss_fn_args=None, trainer__trainer_config=None)
    check(config)
    arguments = {"method": DEFAULT, "clip_range": 0.2, "loss_agg_mode": "token-mean"}
    assert config.algorithm.policy_loss_fn_args == arguments | {"state_dir": "job"}
    config = configuration(algorithm__policy_loss_fn_args={"state_dir": "mine"})
    config.trainer.trainer_config = {"actor_rollout_ref": {"actor": None}}
    check(config)
    assert config.algorithm.policy_loss_fn_args == {"state_dir": "mine"}


def test_arguments_of_the_loss(trinity: Any, tmp_path: Path) -> None:
    make = trinity.GACPolicyLoss
    loss = make(state_dir=str(tmp_path), backend="x")
    assert loss.backend == "x"
    assert loss.rollout_options == {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl_coef": 0.0,
        "rollout_reduction": "token",
    }
    given = {"clip_range_low": 0.0, "clip_range_high": 0.3, "clip_ratio_c": None, "kl_coef": 0.5}
    loss = make(state_dir="x", loss_agg_mode="seq-mean-token-mean", **given)
    assert loss.rollout_options == {
        "clip_low": 0.0,
        "clip_high": 0.3,
        "dual_clip": None,
        "kl_coef": 0.5,
        "rollout_reduction": "sequence",
    }
    with pytest.raises(ValueError, match="state_dir is empty"):
        make()
    with pytest.raises(ValueError, match="loss_agg_mode='x': use one of token-mean, seq-mean-tok"):
        make(state_dir="x", loss_agg_mode="x")


ROWS = 4
LOGPS = torch.tensor([[0.5, 0.25, 0.125], [0.8, 0.5, 0.1], [0.5, 0.5, 0.5], [0.2, 0.4, 0.5]]).log()
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]])
EXPERTS = torch.tensor([0, 1, 0, 1])
ADVANTAGES = torch.tensor([[2.0], [0.0], [-1.0], [0.0]]).expand(4, 3)
RATIO = 1.1
# the loss of the rollouts' tokens, and of the demonstrations' tokens
ROLLOUTS, DEMOS = -RATIO * (2 * 2.0 + 3 * -1.0), -math.log(0.8) - math.log(0.4)


def call(loss: Any, part: slice, step: int = 1, /, **changes: Any) -> tuple[torch.Tensor, Any]:
    counts = {"rollouts": 2, "rollout_tokens": 5, "demos": 2, "demo_tokens": 2, "rows": ROWS}
    size = len(LOGPS[part])
    fields = {f"gac_{n}": torch.full((size,), c) for n, c in (counts | changes).items()}
    return loss(
        logprob=LOGPS[part].clone().requires_grad_(),
        old_logprob=LOGPS[part] - math.log(RATIO),
        action_mask=MASK[part],
        advantages=ADVANTAGES[part],
        expert_mask=EXPERTS[part],
        step=torch.full((size,), step),
        ref_logprob=LOGPS[part] - 0.5,
        other="a field of another loss",
        **fields,
    )


def test_micro_batches_sum_to_the_loss_of_the_step(trinity: Any, tmp_path: Path) -> None:
    method = {"name": "constant", "mu": 0.25}
    for mode, rollouts in (
        ("token-mean", ROLLOUTS / 5),
        ("seq-mean-token-mean", -RATIO * (2 - 1) / 2),
    ):
        loss = trinity.GACPolicyLoss(state_dir=str(tmp_path), method=method, loss_agg_mode=mode)
        with torch.no_grad():
            assert call(loss, slice(0, 1))[1] == {}
            assert loss.rows_done == 0
        first, log = call(loss, slice(0, 3))
        assert log == {"gac/mu": 0.25}
        second, log = call(loss, slice(3, 4))
        losses = log["gac/rollout_loss"], log["gac/demo_loss"], (first + second).item()
        expected = rollouts, DEMOS / 2, 0.75 * rollouts + 0.25 * DEMOS / 2
        assert losses == pytest.approx(expected, rel=1e-6)
        kl = math.exp(-0.5) - 0.5
        assert log["gac/kl"] == pytest.approx(kl, rel=1e-5)
        assert "gac/demo_tokens" not in log
    penalized = trinity.GACPolicyLoss(state_dir=str(tmp_path), method=method, kl_coef=2.0)
    expected = 0.75 * (ROLLOUTS / 5 + 2 * (math.exp(-0.5) - 0.5)) + 0.25 * DEMOS / 2
    assert call(penalized, slice(0, 4))[0].item() == pytest.approx(expected, rel=1e-5)


@dataclass(frozen=True)
class Doubled(Constant):
    """Both terms have the weight 1."""

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.5, scale=2.0)


def test_the_weights_of_a_method_may_have_any_sum(trinity: Any, tmp_path: Path) -> None:
    loss = trinity.GACPolicyLoss(state_dir=str(tmp_path), method=f"{__name__}:Doubled")
    value, _ = call(loss, slice(0, 4))
    assert value.item() == pytest.approx(ROLLOUTS / 5 + DEMOS / 2, rel=1e-6)


def test_shaped_demonstrations_have_weight_one(trinity: Any, tmp_path: Path) -> None:
    """Their advantage in Trinity is 0."""
    method = {"name": "constant", "mu": 1.0, "weight": "shaped"}
    value, log = call(trinity.GACPolicyLoss(state_dir=str(tmp_path), method=method), slice(0, 4))
    assert value.item() == pytest.approx(-(0.8 / 0.9 + 0.4 / 0.5) / 2) == log["gac/demo_loss"]


def test_the_controller_is_restored_after_a_restart(trinity: Any, tmp_path: Path) -> None:
    method = {"name": "gac", "update_every": 1}
    loss = trinity.GACPolicyLoss(state_dir=str(tmp_path), method=method)
    mus = [call(loss, slice(0, 4), step)[1]["gac/mu"] for step in (1, 2, 3)]
    assert len(set(mus)) == 3
    assert loss.rows_done == 0
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json"))
    assert files == [Path(f"gac_{step}/gac.json") for step in (1, 2, 3)]
    for step in (0, 2):  # checkpoints; step 1 has none
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    resumed = trinity.GACPolicyLoss(state_dir=str(tmp_path), method=method)
    assert call(resumed, slice(0, 4), 3)[1]["gac/mu"] == mus[2]
    assert {path.name for path in tmp_path.glob("gac_*")} == {"gac_2", "gac_3"}
    call(resumed, slice(0, 2), 4)
    with pytest.raises(RuntimeError, match=r"step 4 is incomplete: this rank processed 2 rows"):
        call(resumed, slice(0, 2), 5)
    with pytest.raises(FileNotFoundError, match="saved without a controller"):
        call(trinity.GACPolicyLoss(state_dir=str(tmp_path / "x"), method=method), slice(0, 1), 2)
    with pytest.raises(RuntimeError, match=r"processed 2 of the training step's 3 demonstration"):
        call(resumed, slice(2, 4), 4, demo_tokens=3)
    fresh = trinity.GACPolicyLoss(state_dir=str(tmp_path / "y"), method="constant")
    call(fresh, slice(2, 3), demos=0, demo_tokens=0, rows=1)  # a step without demonstrations
    call(fresh, slice(0, 4), 2)
    with pytest.raises(RuntimeError, match="2 demonstrations in one step"):
        call(fresh, slice(0, 4), 3, demos=1)


def test_the_first_of_two_ranks_saves_the_controller(trinity: Any, tmp_path: Path) -> None:
    """Each has half of the rows; the divisors are for gradients that are averaged over ranks."""
    for rank in (1, 0):
        trinity.dist = SimpleNamespace(
            is_initialized=lambda: True, get_world_size=lambda: 2, get_rank=lambda rank=rank: rank
        )
        options = {
            "state_dir": str(tmp_path / str(rank)),
            "method": {"name": "constant", "mu": 0.25},
        }
        value, log = call(trinity.GACPolicyLoss(**options), slice(0, ROWS), rows=2 * ROWS)
        expected = 0.75 * ROLLOUTS / 5 + 0.25 * DEMOS / 2
        assert value.item() == pytest.approx(2 * expected, rel=1e-6)
        assert "gac/demo_loss" in log
        assert (tmp_path / str(rank)).exists() == (rank == 0)
