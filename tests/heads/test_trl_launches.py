"""What our part of a TRL update would launch on a GPU, and that the host waits for none of it."""

from typing import Any
from unittest import mock

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.16")

from trl import GRPOTrainer  # noqa: E402 - after the skip
from trl.trainer import utils  # noqa: E402 - after the skip

from gac_kernels.heads.trl import FusedGRPOTrainer, apply_fused_head  # noqa: E402 - after the skip
from gac_kernels.heads.trl.head import FusedLogProbs  # noqa: E402 - after the skip
from tests.device_trace import Trace, trace  # noqa: E402 - after the skip
from tests.heads.test_trl_fused import (  # noqa: E402 - after the skip
    make_inputs,
    trainer,
)

__all__ = ["trainer"]  # a fixture


def update(trainer: Any, kind: type, **options: Any) -> Trace:
    """The trace of one micro-batch, as TRL computes it on a GPU."""
    inputs = make_inputs(trainer, off_policy=True)
    del inputs["tool_mask"]
    trainer.__class__ = kind
    trainer.model.train()
    on_gpu = mock.patch.object(utils, "_use_triton", lambda device: True)
    settings = {"current_gradient_accumulation_steps": 3, **options}
    with pytest.MonkeyPatch.context() as patch, on_gpu, apply_fused_head():
        for name, value in settings.items():
            patch.setattr(trainer, name, value, raising=False)
        with trace() as found:
            trainer._compute_loss(trainer.model, inputs).backward()
    return found


def test_the_head() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw, requires_grad=True) for n in (6, 33))
    targets = torch.randint(33, (6,), generator=draw)
    settings = (None, targets, 0.7, 1, None, 1.0, ("log_probs", "entropy"))
    upstream = torch.ones(6)
    with trace() as found:
        out = FusedLogProbs.apply(hidden, weight, *settings)
    with trace() as backward:
        torch.autograd.grad(out.log_probs, [hidden, weight], upstream)
    assert len(found.launches) <= 4, found.summary()
    assert len(backward.launches) <= 7, backward.summary()
    assert not found.waits, found.summary()
    assert not backward.waits, backward.summary()


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"loss_type": "dapo"}, 19),
        ({"loss_type": "dapo", "beta": 0.0}, 18),
        ({"loss_type": "grpo"}, 18),
        ({"loss_type": "bnpo"}, 20),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_the_fused_loss(trainer: Any, options: dict[str, Any], launches: int) -> None:
    ours = update(trainer, FusedGRPOTrainer, **options).within("gac_kernels/")
    assert len(ours.launches) <= launches, ours.summary()
    assert not ours.waits, ours.summary()


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "bnpo"},
        {"use_vllm": True, "vllm_importance_sampling_correction": True},
        {"loss_type": "dapo", "beta": 0.0, "_entropy_bonus_enabled": True, "entropy_coef": 0.05},
    ],
)
def test_the_adapter_reads_nothing(trainer: Any, options: dict[str, Any]) -> None:
    ours = update(trainer, FusedGRPOTrainer, **options).within("gac_kernels/heads/")
    assert ours.launches
    assert not ours.waits, ours.summary()


def test_the_rest_of_the_update_is_that_of_trl(trainer: Any) -> None:
    """TRL reads the mask twice to select the scored tokens, and its metrics."""
    expected = update(trainer, GRPOTrainer, loss_type="dapo")
    found = update(trainer, FusedGRPOTrainer, loss_type="dapo")
    ours = found.within("gac_kernels/")
    assert len(found.waits) - len(ours.waits) == len(expected.waits) - len(
        expected.within("gac_kernels/").waits
    )
