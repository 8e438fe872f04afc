"""The table of backends. A backend is a module with these functions and nothing else in common:

`unavailable(device, dtype) -> str | None`
    Why it cannot run there, in words; None when it can.
`plan(inputs, spec, dtype) -> Tokens`
    One row of numbers per token: `tokens.plan`, which defines it, in few launches.
`reduce(tokens, terms, moments) -> Summary`
    The sums over all tokens in float64: `tokens.finish`, which defines it, in few launches.
`row_stats(logits, targets, temperature) -> (logps, entropy, lse)`
    float32 [N] each, one read of the rows that have a loss; 0 in the other places.
`row_grads(logits, targets, lse, entropy, d_logps, d_entropy, temperature, out) -> None`
    out [B, T, V] = gradient of the logits from those of logps and entropy (float32 [N] each):
    d_logp (onehot - p) / temperature - d_entropy p (log p + H) / temperature.
`row_loss(logits, tokens, spec, out) -> TokenTerms`
    Statistics, token formulas (`reference.token_terms`) and, unless `out` is None, the gradient
    of sum(tokens.scale * loss) in one call.
`scale_(tensor, factor) -> None`
    tensor *= factor (0-d, where the tensor lives), without touching the tensor when factor is 1.

`plan` and `reduce` make constants: they run under no_grad and never wait for a device.
`logits` and `out` are [B, T, V] with N = B T rows of any stride and a contiguous last dimension;
`out` may have another float dtype than the logits, or be their own storage. Rows whose target is
-100 are never read and get an all-zero gradient, as does a row with zero coefficients.
A row kernel never uses atomics and sums in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

NAMES = ("reference", "triton", "native")
# The fastest first. On CUDA "native" will join where bench/ has shown it to win: not measured yet.
_PREFERRED = {"cpu": ("native", "reference"), "cuda": ("triton", "reference")}


def load(name: str, device: torch.device) -> ModuleType:
    """The module of a backend, imported on first use; "native" is one for each kind of device."""
    if name not in NAMES:
        raise ValueError(f"backend={name!r}: use 'auto' or one of {', '.join(NAMES)}")
    if name == "native":
        name = "cuda" if device.type == "cuda" else "cpu"
    return importlib.import_module(f".{name}", __name__)


def unavailable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run on `device` for inputs of `dtype`; None when it can."""
    return load(name, device).unavailable(device, dtype)


def choose(name: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The backend to run on `device` for inputs of `dtype`.

    Raises ValueError for an unknown name, RuntimeError for one that cannot run here.
    """
    if name != "auto":
        if reason := unavailable(name, device, dtype):
            raise RuntimeError(f"backend={name!r} cannot run here: {reason}")
        return load(name, device)
    for candidate in _PREFERRED.get(device.type, ("reference",)):
        if unavailable(candidate, device, dtype) is None:
            return load(candidate, device)
    raise AssertionError("the reference backend runs everywhere")
