"""The parts of TRL's head and fused loss that need no training: settings, divisors, fallbacks."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.15")

from trl import GRPOTrainer  # noqa: E402 - after the skip

from gac_kernels.heads.trl import FusedGRPOTrainer  # noqa: E402 - after the skip
from gac_kernels.heads.trl.grpo import FusedLoss, Inexpressible  # noqa: E402 - after the skip
from gac_kernels.heads.trl.head import (  # noqa: E402 - after the skip
    FusedLogProbs,
    head_override,
    missing_hook,
)


def test_the_head_computes_in_the_dtype_of_autocast() -> None:
    seen: list[Any] = []

    def outputs(inputs: Any) -> Any:
        assert not torch.is_autocast_enabled("cpu")
        seen.append(inputs)
        return "outputs"

    hidden, weight = torch.ones(2, 4, dtype=torch.float64), torch.ones(3, 4)
    given = (weight, torch.ones(3), torch.tensor([0, 2]), 0.7, 1, 5.0, 1.3, ("log_probs",))
    with head_override(outputs):
        assert FusedLogProbs.apply(hidden, *given) == "outputs"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            FusedLogProbs.apply(hidden, *given)
    for inputs, dtype in zip(seen, (torch.float64, torch.bfloat16), strict=True):
        assert (inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype) == (dtype,) * 3
        assert inputs.targets.tolist() == [0, 2]
        assert (inputs.temperature, inputs.softcap, inputs.logit_scale) == (0.7, 5.0, 1.3)
    logps = FusedLogProbs.apply(hidden, *given).log_probs  # the override has ended
    assert logps.tolist() == pytest.approx([-math.log(3)] * 2)


def test_without_trl(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    assert missing_hook() == "apply_fused_head needs TRL: pip install 'gac-kernels[trl]'"


# --- the fused loss


def settings(**changes: Any) -> Any:
    """The fields of a trainer that `_fused_loss` reads."""
    args = {"delta": None, "use_bias_correction_kl": False}
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.5, "steps_per_generation": 2}
    defaults: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.25,
        "epsilon_high": 0.5,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 3,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=2),
        "max_completion_length": 7,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.5,
        "_last_world_entropy": 2.0,
        "args": SimpleNamespace(**(args | changes.pop("args", {}))),
    }
    return SimpleNamespace(**(defaults | changes))


@pytest.mark.parametrize(
    ("changes", "off_policy", "expected"),
    [
        ({}, True, {"clip_low": 0.25, "clip_high": 0.5}),
        ({"args": {"delta": 1.5}}, True, {"clip_low": 0.25, "clip_high": 0.5, "dual_clip": 1.5}),
        ({"args": {"delta": 1.49}}, True, "delta=1.49 below 1"),
        ({"args": {"delta": 1.0}, "epsilon_high": 0}, True, "delta=1.0 below .*, or not above 1"),
        (
            {"loss_type": "cispo"},
            True,
            {"policy_loss": "cispo", "clip_low": None, "clip_high": -0.5},
        ),
        ({"loss_type": "sapo"}, True, {"policy_loss": "sapo", "sapo_tau": (1.0, 1.5)}),
        ({"loss_type": "vespo"}, False, {"policy_loss": "reinforce"}),
        ({"loss_type": "vespo"}, True, "loss_type=vespo"),
        ({"top_entropy_quantile": 0.9}, False, "top_entropy_quantile"),
    ],
)
def test_losses_of_trl_as_settings(changes: Any, off_policy: bool, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(Inexpressible, match=expected):
            FusedGRPOTrainer._policy(settings(**changes), off_policy)
        return
    assert FusedGRPOTrainer._policy(settings(**changes), off_policy) == expected
    by_sequence = settings(**changes, importance_sampling_level="sequence")
    assert FusedGRPOTrainer._policy(by_sequence, off_policy) == expected | {
        "importance_sampling_level": "sequence"
    }


@pytest.mark.parametrize(
    ("loss_type", "training", "expected"),
    [
        ("dapo", True, 10 / 2 * 3 / 2),
        ("dapo", False, 10 / 2),
        ("bnpo", True, 4 * 3),
        ("bnpo", False, 4),
        ("dr_grpo", True, 2 * 7 * 3),
        ("dr_grpo", False, 2 * 7),
        ("grpo", True, 2 * 3),
        ("grpo", False, 2),
    ],
)
def test_divisors_of_trl(loss_type: str, training: bool, expected: float) -> None:
    """Of two rollouts with 4 tokens in three micro-batches; two ranks have 10 tokens.

    The fused loss of no token is 0 whatever its divisor.
    """
    trainer = settings(loss_type=loss_type, model=SimpleNamespace(training=training))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    inputs = {"num_items_in_batch": torch.tensor(10)}
    assert FusedGRPOTrainer._norm(trainer, inputs, mask) == expected
    empty = FusedGRPOTrainer._norm(trainer, {"num_items_in_batch": torch.tensor(0)}, 0 * mask)
    assert empty == (0 if loss_type in ("dapo", "bnpo") else expected)


@pytest.mark.parametrize(
    ("changes", "coefficient", "divisor", "weight"),
    [
        # with a KL term, the coefficient has the ratio of the divisors
        ({"beta": 0.1}, 0.5 * 24 / (4 * 3), 24.0, None),
        ({"beta": 0.1, "model": SimpleNamespace(training=False)}, 0.5 * 24 / 4, 24.0, None),
        ({}, 0.5, 4.0 * 3, 4 * 3 / 24),
        ({"model": SimpleNamespace(training=False)}, 0.5, 4.0, 4 / 24),
        ({"loss_type": "bnpo"}, 0.5, 24.0, None),
        ({"use_adaptive_entropy": True, "args": {"entropy_target": 2.0}}, 0.5, 12.0, 0.5),
        ({"use_adaptive_entropy": True, "args": {"entropy_target": 1.9}}, 0.0, 24.0, None),
    ],
)
def test_entropy_bonus_of_trl(
    changes: Any, coefficient: float, divisor: float, weight: float | None
) -> None:
    """Of 4 tokens in three micro-batches, if the loss is divided by 24."""
    trainer = settings(**{"loss_type": "dapo", "beta": 0.0, **changes})
    mask, weights = torch.ones(2, 2, dtype=torch.long), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found, norm, factors = FusedGRPOTrainer._entropy_bonus(trainer, mask, 24.0, None)
    assert found == pytest.approx(coefficient)
    assert norm == divisor
    if weight is None:
        assert factors is None
    else:
        assert factors.equal(torch.full((2, 2), weight))
    *_, factors = FusedGRPOTrainer._entropy_bonus(trainer, mask, 24.0, weights)
    assert factors.equal(weights * (weight or 1))


@pytest.mark.parametrize("loss_type", ["sapo", "grpo"])
def test_an_entropy_bonus_with_a_mean_over_sequences_falls_back(loss_type: str) -> None:
    trainer, mask = settings(loss_type=loss_type), torch.ones(2, 2)
    with pytest.raises(Inexpressible, match=f"entropy_coef with loss_type={loss_type}"):
        FusedGRPOTrainer._entropy_bonus(trainer, mask, 24.0, None)


@pytest.mark.parametrize("norm", [24.0, torch.tensor(0.0, dtype=torch.float64)])
def test_an_entropy_bonus_of_no_token_has_finite_weights(norm: Any) -> None:
    trainer = settings(loss_type="dapo", beta=0.0)
    mask = torch.zeros(2, 2, dtype=torch.long)
    *_, weights = FusedGRPOTrainer._entropy_bonus(trainer, mask, norm, None)
    assert weights.isfinite().all()


def test_weights_known_before_the_forward_pass() -> None:
    weights, mask = FusedGRPOTrainer._weights, torch.ones(2, 3)
    ratio = torch.tensor([[0.5], [2.0]])
    inputs = {"advantages": torch.tensor([1.0, 2.0]), "importance_sampling_ratio": ratio}
    assert weights(settings(), inputs, mask, None) is None
    uncorrected = settings(use_vllm=True, vllm_importance_sampling_correction=False)
    assert weights(uncorrected, inputs, mask, None) is None
    assert weights(settings(use_vllm=True), inputs, mask, None).tolist() == [[0.5] * 3, [2.0] * 3]
    masking = settings(off_policy_mask_threshold=0.5)
    assert weights(masking, inputs, mask, None) is None
    for given, old in ((inputs, mask), (inputs | {"sampling_per_token_logps": mask}, None)):
        with pytest.raises(Inexpressible, match="off_policy_mask_threshold"):
            weights(masking, given, mask, old)
    calls: list[Any] = []

    def gamma(**options: Any) -> torch.Tensor:
        calls.append(options)
        return torch.ones(2, 1)

    names = {"k_pos": 1, "lambda_pos": 2, "k_neg": 3, "lambda_neg": 4}
    args = {f"vespo_{name}": value for name, value in names.items()}
    trainer = settings(loss_type="vespo", get_gamma_weights=gamma, args=args)
    assert weights(trainer, inputs, mask, None).shape == (2, 3)
    (options,) = calls
    assert {name: options[name] for name in names} == names
    assert options["advantages"].tolist() == [[1], [2]]
    assert options["mask"] is mask
    assert options["importance_sampling_ratio"] is ratio
    assert options["log_ratio_per_token"].tolist() == [[0] * 3] * 2


def test_a_micro_batch_without_gradients_has_no_request(monkeypatch: Any, caplog: Any) -> None:
    """The request of the last one is not used again, also if it failed."""
    trainer: Any = object.__new__(FusedGRPOTrainer)
    result: Any = "out"
    request = trainer._request = FusedLoss(torch.zeros(1), torch.zeros(1), None, {}, out=result)
    requests: list[Any] = []

    def compute(self: Any, model: Any, inputs: Any) -> torch.Tensor:
        requests.append(self._request)
        request.surrogate = torch.tensor(5.0, requires_grad=True) if inputs == "scored" else None
        return torch.tensor(2.0)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", compute)
    monkeypatch.setattr(FusedGRPOTrainer, "_check_host", staticmethod(lambda function: None))
    monkeypatch.setattr(FusedGRPOTrainer, "_fused_loss", lambda self, inputs: request)
    with torch.no_grad():
        trainer._compute_loss(None, "plain")
    assert trainer.rollout_out is None
    loss = trainer._compute_loss(None, "scored")
    assert loss.item() == 2
    assert loss.requires_grad
    assert trainer.rollout_out == "out"
    assert not trainer._compute_loss(None, "plain").requires_grad
    assert requests == [None, request, request]
    scores = ("log-probs", "entropy", "more")
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_: scores)
    trainer._request = FusedLoss(torch.zeros(1), torch.zeros(1), None, {})
    ids = torch.zeros(1, 3)
    assert trainer._get_per_token_logps_and_entropies(None, ids, None) == scores
    assert "does not support a model whose forward does not use TRL's LM head" in caplog.text
