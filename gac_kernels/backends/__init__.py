"""Backend registry. A backend is a module with these functions:

`unavailable(device, dtype) -> str | None`
    Why the backend cannot run on `device`; None if it can.
`plan(inputs, spec, dtype) -> Tokens`
    Computes the per-token values, as defined by `tokens.plan`, in few kernel launches.
`reduce(tokens, terms, moments) -> LossOutput`
    Sums over all tokens in float64, as defined by `tokens.reduce`.
`row_stats(logits, targets, scaling, *, more_outputs) -> (logps, entropy, lse)`
    Each is float32 [N], 0 for rows without a loss. Reads each row with a loss once. A target
    outside [0, V) reads nothing, and its logp is nan; without finite logits, lse is -inf.
    `more_outputs` adds contract.MORE_OUTPUTS, also in float32.
`row_grads(logits, targets, scaling, upstream, out, *, whole_row) -> None`
    Writes to out [B, T, V] the gradient of the logits, given those of logps and entropy
    (`upstream`, float32 [N] each):
    d_logp (onehot - p) / temperature - d_entropy p (log p + H) / temperature,
    times the derivative of the softcap.
    `whole_row=False`: the rows are parts of longer ones, to which `lse` and `entropy` belong.
`row_loss(logits, tokens, spec, out, *, softcap) -> TokenTerms`
    Computes the statistics, the token formulas (`reference.token_terms`) and, unless `out` is
    None, the gradient of sum(tokens.scale * loss) in one call.
    `tokens.temperature` replaces that of the spec.
`scale_(tensor, factor) -> None`
    Multiplies in place by factor (0-d, on the tensor's device); a no-op if factor is 1.

`scaling` is a `tokens.Scaling`, `upstream` a `tokens.Upstream`.
`plan` and `reduce` are not differentiable: they run under no_grad and never synchronize with a
device. `logits` and `out` are [B, T, V] with N = B T rows of any stride and a contiguous last
dimension; `out` may have a different float dtype from the logits, or be the logits themselves, but
not a narrower view of their storage: parts of a row are still to be read. Rows whose target is -100
are never read and get an all-zero gradient, as do rows with zero coefficients. Row kernels use no
atomics and sum in a fixed order, so results are bitwise reproducible.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import warnings
from types import ModuleType

import torch

NAMES = ("reference", "triton", "native")
# fastest first; "native" on CUDA needs nvcc and gains at most 2% in the linear form on an H200
_PREFERRED = {"cpu": ("native", "reference"), "cuda": ("triton", "reference")}


@functools.cache
def load(name: str, device: torch.device) -> ModuleType:
    """The module of a backend, imported on first use; "native" has one module per device type."""
    if name not in NAMES:
        raise ValueError(f"backend={name!r}: use 'auto' or one of {', '.join(NAMES)}")
    native = ".cuda" if device.type == "cuda" else ".cpu"
    modules = {"reference": "..reference", "triton": ".triton", "native": native}
    return importlib.import_module(modules[name], __name__)


def unavailable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run on `device` for inputs of `dtype`; None if it can."""
    return load(name, device).unavailable(device, dtype)


def select_backend(name: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Choose the backend that runs on `device` for inputs of `dtype`.

    Raises:
        ValueError: an unknown name.
        RuntimeError: the backend cannot run here; the message says why.
    """
    if name != "auto":
        if reason := unavailable(name, device, dtype):
            raise RuntimeError(f"backend={name!r} cannot run here: {reason}")
        return load(name, device)
    for candidate in _PREFERRED.get(device.type, ("reference",)):
        module = load(candidate, device)
        reason = module.unavailable(device, dtype)
        if reason is None:
            _log_first_use(module, device)
            return module
        if dtype != torch.float64:  # only the reference computes in float64
            warn_once(f"backend {candidate!r} cannot run: {reason}; using 'reference'")
    raise AssertionError("the reference backend runs everywhere")


def name_of(module: ModuleType) -> str:
    """The name of a backend's module."""
    name = module.__name__.rpartition(".")[2]
    return name if name in NAMES else "native"


@functools.cache  # once per process
def _log_first_use(module: ModuleType, device: torch.device) -> None:
    logging.getLogger("gac_kernels").info(
        "using the %s backend on %s", name_of(module), device.type
    )


@functools.cache  # once per reason
def warn_once(message: str) -> None:
    frames = inspect.stack(context=0)
    own = [frame.frame.f_globals.get("__name__", "").startswith("gac_kernels") for frame in frames]
    warnings.warn(message, RuntimeWarning, stacklevel=own.index(False) + 1)  # the caller's line
