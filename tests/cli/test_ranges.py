"""Valid ranges of numeric arguments: values at and next to the bounds."""

import math
from functools import partial

import pytest
import torch

from gac import ControllerConfig
from gac.control.alarm import Alarm
from gac.control.gate import Gate
from gac.control.schedules import MixSchedule
from gac.data.config import Source
from gac.evaluation.config import EvalTask
from gac.methods import METHODS
from gac.models.config import LoraConfig
from gac.parallel.config import ParallelConfig
from gac.rollouts.config import PagedConfig, RolloutConfig, VLLMConfig
from gac.train_config import GuardConfig, OptimConfig, TrainConfig
from gac_kernels import LossSpec, fused_gac_loss

UNIT, BELOW_ONE, FREE, POSITIVE = "[0, 1]", "[0, 1)", "[0, inf)", "(0, inf)"
ABOVE_ZERO_TO_ONE = "(0, 1]"
VALUES = (-math.inf, -1.0, -1e-9, 0, 1e-9, 0.5, 1 - 1e-9, 1, 1 + 1e-9, 2.0, math.inf, math.nan)


def inside(value: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = low <= value if interval[0] == "[" else low < value
    return above and (value <= high if interval[-1] == "]" else value < high)


Z_GATE = partial(Gate, form="z")
CONTROL = [  # callable, interval, names of its arguments
    (ControllerConfig, BELOW_ONE, "ema_decay signal_decay kl_decay"),
    (ControllerConfig, UNIT, "prior_blend"),
    (lambda mu_max: ControllerConfig(mu_min=0, mu_init=0, mu_max=mu_max), UNIT, "mu_max"),
    (
        lambda alpha_min: ControllerConfig(alpha_min=alpha_min, alpha_init=1, alpha_max=1),
        UNIT,
        "alpha_min",
    ),
    (ControllerConfig, FREE, "max_step kl_up kl_down kl_hysteresis"),
    (ControllerConfig, POSITIVE, "kl_target"),
    (Z_GATE, UNIT, "at_zero hysteresis"),
    (Z_GATE, FREE, "slope"),
    (Z_GATE, BELOW_ONE, "decay"),
    (Alarm, POSITIVE, "threshold min_scale"),
    (Alarm, FREE, "slack"),
    (Alarm, BELOW_ONE, "decay"),
    (Alarm, "[0, 0.5)", "trim"),
    (partial(Alarm, slack=0.5), "(0.5, inf)", "clip"),
    (lambda **fields: MixSchedule(**{"peak": 1.0, "valley": 0.0, **fields}), UNIT, "peak valley"),
    (partial(MixSchedule, 1.0, 0.0), UNIT, "start"),
    (METHODS["gradnorm"], FREE, "lr"),
    (METHODS["pcgrad"], "[-1, 1]", "threshold"),
    (METHODS["cagrad"], FREE, "radius"),
    (METHODS["sdmgrad"], FREE, "regularization"),
    (METHODS["uncertainty"], FREE, "lr"),
    (METHODS["dwa"], POSITIVE, "temperature"),
    (METHODS["famo"], FREE, "lr decay"),
]
ROLLOUT = torch.zeros(1, 1, 2), torch.zeros(1, 1).long(), torch.ones(1)
NUMBERS = [
    *CONTROL,
    (METHODS["nash-mtl"], POSITIVE, "max_norm"),
    (GuardConfig, "(0, inf]", "skip_above_norm"),
    (lambda weight: Source("rows.jsonl", weight=weight), POSITIVE, "weight"),
    (OptimConfig, ABOVE_ZERO_TO_ONE, "lr"),
    (OptimConfig, FREE, "eps weight_decay max_grad_norm"),
    (OptimConfig, UNIT, "min_lr_ratio"),
    (RolloutConfig, POSITIVE, "temperature correction_max"),
    (lambda clip_low: TrainConfig(loss=LossSpec(clip_low=clip_low)), UNIT, "clip_low"),
    (lambda kl_coef: TrainConfig(loss=LossSpec(kl_coef=kl_coef)), FREE, "kl_coef"),
    (RolloutConfig, ABOVE_ZERO_TO_ONE, "top_p"),
    (VLLMConfig, POSITIVE, "timeout"),
    (LoraConfig, BELOW_ONE, "dropout"),
    (lambda top_p: EvalTask(top_p=top_p, temperature=1), ABOVE_ZERO_TO_ONE, "top_p"),
    (EvalTask, FREE, "temperature"),
    (ParallelConfig, POSITIVE, "timeout"),
    (
        partial(RolloutConfig, max_completion_length=8),
        "[1, 8]",
        "overlong_tokens",
    ),
    (lambda pass_at: EvalTask(samples=2, temperature=1, pass_at=(pass_at,)), "[1, 2]", "pass_at"),
    (LossSpec, FREE, "clip_low clip_high correction_max"),
    (partial(LossSpec, None, policy_loss="cispo"), "[-1, inf)", "clip_high"),
    (partial(LossSpec, 0.25, policy_loss="cispo"), "[-0.25, inf)", "clip_high"),
    (partial(LossSpec, correction_max=None), FREE, "correction_min"),
    (partial(LossSpec, correction_max=0.5), "[0, 0.5]", "correction_min"),
    (LossSpec, "(1, inf)", "dual_clip"),
    (LossSpec, "(-inf, inf)", "kl_coef entropy_coef"),
    (LossSpec, POSITIVE, "temperature demo_shape"),
    (partial(fused_gac_loss, *ROLLOUT, mu=0.5), "[0, inf]", "rollout_norm demo_norm"),
    (partial(fused_gac_loss, *ROLLOUT), UNIT, "mu"),
]
METHOD_NUMBERS = [
    ("constant", UNIT, "mu"),
    ("dpo", POSITIVE, "beta"),
    ("ipo", POSITIVE, "tau"),
    ("uft", FREE, "coef"),
    ("uft", UNIT, "low high"),
    ("moco", ABOVE_ZERO_TO_ONE, "rate"),
    ("moco", FREE, "decay lr regularization"),
    ("gradnorm", FREE, "lr"),
    ("nash-mtl", POSITIVE, "scale max_norm"),
    ("pcgrad", "[-1, 1]", "threshold"),
    ("cagrad", FREE, "radius"),
    ("sdmgrad", FREE, "regularization"),
    ("dwa", POSITIVE, "temperature"),
    ("gta", FREE, "sft_coef"),
    ("gta", POSITIVE, "rl_coef"),
    ("guarded", UNIT, "mu mu_suspect"),
    ("gac", UNIT, "prior_blend"),
    ("prefix-rft", UNIT, "high top"),
    ("relift", POSITIVE, "sft_coef"),
    ("hpt", POSITIVE, "sft_coef"),
    ("multitask", FREE, "sft_coef"),
    ("sdar", FREE, "beta"),
    ("sdar", "(-inf, inf)", "coef"),
    ("dypo", UNIT, "alpha"),
    ("kdrl", FREE, "coef final_coef"),
    ("sdpg", FREE, "coef kl_coef"),
    ("sdft", UNIT, "update_rate"),
    ("dypo", POSITIVE, "beta sft_coef"),
    ("amft", "(-inf, inf)", "meta_lr entropy_lr"),
]
NUMBERS += [(METHODS[name], interval, names) for name, interval, names in METHOD_NUMBERS]
CONTROL_COUNTS = [  # callable, minimum, names of its arguments
    (ControllerConfig, 1, "update_every early_update_every"),
    (ControllerConfig, 0, "early_steps"),
    (Alarm, 2, "warmup"),
    (Alarm, 0, "source_steps"),
    (partial(MixSchedule, 1.0, 0.0), 0, "warmup hold decay"),
]
COUNTS = [
    *CONTROL_COUNTS,
    (METHODS["uft"], 1, "hint_steps pieces"),
    (METHODS["dwa"], 1, "window"),
    (METHODS["amft"], 0, "warmup"),
    (METHODS["amft"], 1, "update_every"),
    (METHODS["relift"], 1, "buffer"),
    (METHODS["kdrl"], 1, "anneal_steps"),
    (METHODS["sft-then-rl"], 0, "sft_steps"),
    (METHODS["sft-light"], 1, "examples epochs"),
    (METHODS["gradnorm-ctrl"], 1, "update_every"),
    (METHODS["gac-gated"], 2, "gradient_parts"),
    (METHODS["kl-ctrl"], 1, "calibration"),
    (GuardConfig, 1, "patience"),
    (GuardConfig, 0, "max_saved_steps"),
    (LoraConfig, 1, "rank alpha"),
    (
        RolloutConfig,
        1,
        "num_prompts num_generations max_completion_length num_iterations generation_batch_size",
    ),
    (TrainConfig, 1, "steps demo_batch_size checkpoint_every keep_checkpoints"),
    (TrainConfig, 1, "micro_batch_size max_tokens_per_micro_batch"),
    (TrainConfig, 0, "seed"),
    (
        partial(TrainConfig, seed=2**31 - 1, monitor_kl_every=1, loss=LossSpec(clip_low=None)),
        1,
        "kl_sample_size",
    ),
    (partial(TrainConfig, method=METHODS["gac"]()), 1, "kl_sample_size"),
    (partial(TrainConfig, method=METHODS["srft"](), monitor_kl_every=1), 1, "kl_sample_size"),
    (ParallelConfig, 1, "replicas"),
    (PagedConfig, 1, "max_batch_tokens num_blocks"),
    (PagedConfig, 4, "block_size"),
    (EvalTask, 1, "max_completion_length batch"),
    (lambda samples: EvalTask(samples=samples, temperature=1.0), 1, "samples"),
]


def accepts(call, name: str, value: object) -> bool:
    """Whether `call` accepts the argument; an error must name it with its value."""
    try:
        call(**{name: value})
    except ValueError as error:
        assert f"{name}={value!r}: use " in str(error)
        return False
    return True


@pytest.mark.parametrize(("call", "interval", "names"), NUMBERS)
def test_numbers_are_accepted_exactly_in_their_interval(call, interval: str, names: str) -> None:
    bounds = [x for x in map(float, interval[1:-1].split(",")) if math.isfinite(x)]
    values = [*VALUES, *(x + d for x in bounds for d in (-1e-9, 0, 1e-9))]
    for name in names.split():
        assert [x for x in values if accepts(call, name, x)] == [
            x for x in values if inside(x, interval)
        ], name


@pytest.mark.parametrize(("call", "minimum", "names"), COUNTS)
def test_counts_are_accepted_from_their_minimum(call, minimum: int, names: str) -> None:
    for name in names.split():
        accepted = [x for x in range(minimum - 2, minimum + 2) if accepts(call, name, x)]
        assert accepted == [minimum, minimum + 1], name


@pytest.mark.parametrize(("call", "_", "names"), [*CONTROL, *CONTROL_COUNTS])
def test_texts_and_booleans_are_not_numbers(call, _, names: str) -> None:
    for name in names.split():
        assert not accepts(call, name, "0.5"), name
        assert not accepts(call, name, True), name


@pytest.mark.parametrize("name", ["mu", "alpha"])
def test_limits_are_ordered_and_contain_the_first_value(name: str) -> None:
    low, high, init = f"{name}_min", f"{name}_max", f"{name}_init"

    def limited(**fields):
        return ControllerConfig(**{low: 0.2, high: 0.6, init: 0.6, **fields})

    assert not accepts(limited, init, 0.19)
    assert accepts(limited, init, 0.2)
    assert accepts(limited, init, 0.6)
    assert not accepts(limited, init, 0.61)
    assert not accepts(limited, init, "0.3")
    assert accepts(limited, low, 0.6)
    assert not accepts(limited, low, 0.61)


def test_a_batch_of_tokens_holds_the_rollouts_of_a_prompt() -> None:
    RolloutConfig(num_generations=2, max_completion_length=3, generation_batch_tokens=8)
    with pytest.raises(
        ValueError, match="generation_batch_tokens=7: the 2 rollouts .* at least 8 tokens"
    ):
        RolloutConfig(num_generations=2, max_completion_length=3, generation_batch_tokens=7)
