"""Batches for the Triton tests, and a comparison with the float64 reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gac_kernels import fused_gac_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("loss", "rollout_loss", "demo_loss", "kl", "clip_fraction", "logps", "entropy")
PER_TOKEN = ("logits", "targets", "old_logps", "ref_logps")


def make_batch(
    rows: int = 3,
    width: int = 2,
    vocab: int = 301,
    dtype: torch.dtype = torch.float32,
    peak: float = 4.0,
) -> dict[str, Any]:
    """A demonstration between two rollouts, with peaked logits as in a trained model and one masked
    token.
    """
    logits = torch.randn(rows, width, vocab) * 2
    targets = torch.randint(vocab, (rows, width))
    logits.scatter_add_(2, targets[..., None], torch.full((rows, width, 1), peak))
    logps = (logits.to(dtype).float().log_softmax(-1)).gather(2, targets[..., None])[..., 0]
    targets[0, -1] = -100
    batch = {
        "logits": logits.to(dtype),
        "targets": targets,
        "advantages": torch.linspace(-1, 1.5, rows),
        "is_demo": torch.arange(rows) % 3 == 1,
        "old_logps": logps + 0.3 * torch.randn(rows, width),
        "ref_logps": logps + 0.3 * torch.randn(rows, width),
        "mu": 0.3,
    }
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in batch.items()}


def evaluate(batch: dict[str, Any], dtype: torch.dtype | None = None, **keywords: Any) -> Any:
    """Return the outputs and the gradient; `dtype` converts the logits, exactly if it is wider."""
    batch = {"mu": 0.5, **batch, **keywords}
    logits = batch.pop("logits").detach()
    logits = logits if dtype is None else logits.to(dtype)
    logits.requires_grad_()
    out = fused_gac_loss(logits, backend=batch.pop("backend"), **batch)
    out.loss.backward()
    return out, logits.grad


def error(value: Tensor, truth: Tensor) -> float:
    """The largest absolute error; infinite if exactly one of the two values is NaN."""
    value, truth = value.double().cpu(), truth.double().cpu()
    equal = (value == truth) | (value.isnan() & truth.isnan())
    return torch.where(equal, 0, (value - truth).abs()).nan_to_num(math.inf).max().item()


def scale_of(truth: Tensor) -> float:
    return max(1.0, truth.double().nan_to_num(0, 0, 0).abs().max().item())


FLOOR = {"triton": 1e-6, "native": 2e-6}  # relative to the largest value


def check(batch: dict[str, Any], backend: str = "triton", **keywords: Any) -> None:
    """Assert that the errors of values and gradients against float64 are at most twice those of the
    same-dtype reference.
    """
    out, grad = evaluate(batch, backend=backend, **keywords)
    truth, true_grad = evaluate(batch, torch.float64, backend="reference", **keywords)
    plain, plain_grad = evaluate(batch, backend="reference", **keywords)
    assert grad.dtype == batch["logits"].dtype
    pairs = [(n, getattr(out, n), getattr(plain, n), getattr(truth, n)) for n in FIELDS]
    pairs.append(("gradient", grad, plain_grad, true_grad))
    if out.moments is not None:
        names = ("rollouts", "demo_nll", "totals")
        pairs += [(n, *(getattr(x.moments, n) for x in (out, plain, truth))) for n in names]
    for name, value, baseline, exact in pairs:
        bound = 2 * error(baseline, exact) + FLOOR[backend] * scale_of(exact)
        assert error(value, exact) <= bound, name
