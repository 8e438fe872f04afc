"""The pretrained model: all ways to train it compute the same losses.

Plain, with gradient checkpointing, in packed rows, sharded over one and two ranks, each with all
weights and with LoRA. The responses are fixed, because sampling amplifies rounding.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gac.config import load
from gac.demo.real_task import write_task
from gac.rollouts import engines
from gac.rollouts.generation import Completion
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer
from tests import ranks
from tests.tiny import TIMING_KEYS, take_steps

pytestmark = pytest.mark.real
STEPS = 3
WORDS = ("12", "19", " tickets", "lamps-green-12", " That is", " 31.", "green-lamps-14")
PLAIN: dict[str, Any] = {"micro_batch_size": 100}
"""All rows in one forward, padded to the longest."""
FSDP = {"parallel": {"mode": "fsdp"}}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, PLAIN),
    "packed": (1, {"max_tokens_per_micro_batch": 4096, "packing": True}),
    "checkpointing": (1, {**PLAIN, "model": {"gradient_checkpointing": True}}),
    "fsdp-1": (1, {**PLAIN, **FSDP}),
    "fsdp-2": (2, {**PLAIN, **FSDP}),
}
WEIGHTS: dict[str, dict[str, Any]] = {"all weights": {}, "LoRA": {"lora": {"rank": 8}}}


def fixed_responses(
    model: Any, tokenizer: Any, prompts: Sequence[Any], *, num_generations: int, **_: Any
) -> list[Completion]:
    """Responses that depend only on the prompt: two or three words, and the end of the turn."""
    responses = []
    for prompt in prompts:
        for i in range(num_generations):
            rng = random.Random(f"{prompt}/{i}")
            text = "".join(rng.sample(WORDS, rng.randint(2, 3)))
            ids = tokenizer.encode(text, add_special_tokens=False)
            responses.append(Completion([*ids, tokenizer.eos_token_id]))
    return responses


def digits(completion: str, example: Any) -> float:
    """The share of digits: rewards that differ within a group."""
    return sum(c.isdigit() for c in completion) / len(completion)


def config(folder: Path, **changes: Any) -> TrainConfig:
    task = folder / "task"
    settings: dict[str, Any] = {
        "out": str(folder / "run"),
        "method": {"name": "gac", "update_every": 1},
        "data": {"prompts": str(task / "prompts.jsonl"), "demos": str(task / "demos.jsonl")},
        "reward": "tests.training.test_real_training:digits",
        "rollouts": {"num_prompts": 2, "num_generations": 2, "max_completion_length": 32},
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01},
        # eps: where a gradient is 0, AdamW would scale rounding noise up to a full-size update
        "optim": {"lr": 2e-5, "warmup_steps": 1, "eps": 1e-4},
        "demo_batch_size": 2,
        "steps": STEPS,
        "checkpoint_every": 100,
        "export": False,
    }
    return load(TrainConfig, {**settings, **changes})


def train_steps(settings: TrainConfig) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    engines.generate = fixed_responses  # type: ignore[assignment]  # runs in its own process
    trainer = Trainer(settings)
    rows = take_steps(trainer, STEPS)
    trainer.heartbeat.stop()  # the process runs more cases
    return rows


@pytest.fixture(scope="module", params=WEIGHTS)
def results(
    request: pytest.FixtureRequest, real_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The steps of each variant, as its first rank records them."""
    if request.param == "LoRA":
        pytest.importorskip("peft", reason="needs the extra `lora`")
    cases: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for name, (count, changes) in VARIANTS.items():
        folder = tmp_path_factory.mktemp("case")
        write_task(folder / "task", prompts=8, demos=16, held_out=2)
        model = {"path": str(real_model), **changes.get("model", {}), **WEIGHTS[request.param]}
        settings = config(folder, **{**changes, "model": model})
        cases[count][name] = train_steps, settings
    found: dict[str, Any] = {}
    for count, own in cases.items():
        found |= ranks.run(ranks.each, own, ranks=count)[0]
    return found


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
def test_the_losses_are_those_of_plain_training(
    results: dict[str, list[dict[str, Any]]], variant: str
) -> None:
    for expected, actual in zip(results["plain"], results[variant], strict=True):
        assert actual["tokens"] == expected["tokens"]
        for key in ("rollout_loss", "demo_loss", "reward_mean", "entropy", "mu"):
            assert actual[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
        unknown = {key for key, value in expected.items() if value is None}
        assert unknown == {key for key, value in actual.items() if value is None}
        for key in expected.keys() - TIMING_KEYS - unknown:  # norms and variances add rounding
            assert actual[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key


def test_the_steps_change_the_model(results: dict[str, list[dict[str, Any]]]) -> None:
    first, *_, last = results["plain"]
    assert last["demo_loss"] != pytest.approx(first["demo_loss"], rel=1e-3)
    assert last["kl"] > 1e-5
    assert first["grad_norm"] > 0.1
