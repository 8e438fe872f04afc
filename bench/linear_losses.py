"""The linear loss of a batch, computed by gac_kernels and by every installed peer.

For a peer that returns log-probabilities, the mixed loss is added in plain PyTorch, as a trainer
would write it. A peer that returns only a mean cross-entropy does less work and is marked as
`scalar`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gac_kernels import LossSpec, fused_linear_gac_loss, reference

from .batches import Batch
from .settings import tiny

SPEC = LossSpec(rollout_reduction="token", demo_reduction="token")
Loss = Callable[[Batch], Tensor]


class Provider(NamedTuple):
    """A way to compute the loss of a batch, differentiable in hidden and weight."""

    loss: Loss
    scalar: bool = False
    """A mean cross-entropy over all tokens: no log-probs, no weights, no rollouts."""


def mixed_loss(logps: Tensor, batch: Batch) -> Tensor:
    """(1 - mu) * clipped policy term + mu * phi-weighted likelihood; both are token means."""
    demo = batch.is_demo[:, None].expand_as(logps)
    ratio = (logps - logps.detach()).exp()
    a = batch.advantages[:, None]
    rollout = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    p = logps.detach().exp()
    demonstration = -p * (1 - p) * logps
    rollouts, demos = (~demo).sum(), demo.sum()
    first = torch.where(demo, 0, rollout).sum() / rollouts
    return (1 - batch.mu) * first + batch.mu * torch.where(demo, demonstration, 0).sum() / demos


def ours(batch: Batch, backend: str = tiny("auto", "triton")) -> Tensor:
    return fused_linear_gac_loss(
        batch.hidden,
        batch.weight,
        batch.targets,
        batch.advantages,
        batch.is_demo,
        mu=batch.mu,
        spec=SPEC,
        backend=backend,
    ).loss


def truth(batch: Batch) -> Tensor:
    """The loss in float64; materializes all logits, so only for small batches."""
    return reference.fused_linear_gac_loss(
        batch.hidden.double(),
        batch.weight.double(),
        batch.targets,
        batch.advantages,
        batch.is_demo,
        mu=batch.mu,
        spec=SPEC,
    ).loss


def cross_entropy_truth(batch: Batch) -> Tensor:
    logits = reference.linear_logits(batch.hidden.double(), batch.weight.double())
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def eager(batch: Batch) -> Tensor:
    """Log-probs and entropy from the full logits in float32, as trainers compute them."""
    log_probs = F.linear(batch.hidden, batch.weight).float().log_softmax(-1)
    logps = log_probs.gather(-1, batch.targets[..., None]).squeeze(-1)
    with torch.no_grad():
        (log_probs.exp() * log_probs).sum(-1).neg()
    return mixed_loss(logps, batch)


def _flat(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.hidden.flatten(0, 1), batch.weight, batch.targets.flatten()


def _torch_tokens(batch: Batch) -> Tensor:
    hidden, weight, targets = _flat(batch)
    nll = F.linear_cross_entropy(hidden, weight, targets, reduction="none")
    return mixed_loss(-nll.view(batch.targets.shape), batch)


def _torch_mean(batch: Batch) -> Tensor:
    hidden, weight, targets = _flat(batch)
    return F.linear_cross_entropy(hidden, weight, targets)


def _trl(batch: Batch) -> Tensor:
    module = importlib.import_module("trl.kernels.chunked_logprob")
    hidden, weight, targets = _flat(batch)
    width = 32768 if hidden.is_cuda else 4096
    logps, *_ = module.ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, width, None, 1.0, ("entropy",)
    )
    return mixed_loss(logps.view(batch.targets.shape), batch)


def _liger_tokens(batch: Batch) -> Tensor:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    hidden, weight, targets = _flat(batch)
    nll, _ = module.LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden, weight, targets, 1.0, -100, 1, True
    )
    return mixed_loss(-nll.view(batch.targets.shape), batch)


def _liger_mean(batch: Batch) -> Tensor:
    module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    hidden, weight, targets = _flat(batch)
    return module.LigerFusedLinearCrossEntropyLoss()(weight, hidden, targets)


def _cce(batch: Batch) -> Tensor:
    module = importlib.import_module("cut_cross_entropy")
    hidden, weight, targets = _flat(batch)
    nll = module.linear_cross_entropy(
        hidden, weight, targets, reduction="none", impl="cce" if hidden.is_cuda else "torch_compile"
    )
    return mixed_loss(-nll.view(batch.targets.shape), batch)


def _quack_mean(batch: Batch) -> Tensor:
    module = importlib.import_module("quack.linear_cross_entropy")
    hidden, weight, targets = _flat(batch)
    return module.chunked_linear_cross_entropy(hidden, weight, targets)


PEERS: dict[str, tuple[str, Provider]] = {  # module and provider, by name
    "TRL chunked_logprob": ("trl.kernels.chunked_logprob", Provider(_trl)),
    "Liger scaled cross-entropy": (
        "liger_kernel.ops.fused_linear_scaled_cross_entropy",
        Provider(_liger_tokens),
    ),
    "cut-cross-entropy": ("cut_cross_entropy", Provider(_cce)),
    "Liger cross-entropy, mean": (
        "liger_kernel.transformers.fused_linear_cross_entropy",
        Provider(_liger_mean, True),
    ),
    "QuACK cross-entropy, mean": ("quack.linear_cross_entropy", Provider(_quack_mean, True)),
}
TORCH = {
    "torch linear_cross_entropy, per token": Provider(_torch_tokens),
    "torch linear_cross_entropy, mean": Provider(_torch_mean, scalar=True),
}
COMPILED = "torch.compile"
NAMES = ("ours", "eager", *TORCH, *PEERS)


def providers(device: torch.device, compiled: bool) -> tuple[dict[str, Provider], dict[str, str]]:
    """The providers that run on `device`, ours first, and why the others do not run."""
    found = {"ours": Provider(ours), "eager": Provider(eager)}
    if compiled:
        found[COMPILED] = Provider(torch.compile(eager))
    missing = {}
    if hasattr(F, "linear_cross_entropy"):
        found |= TORCH
    else:
        missing |= dict.fromkeys(TORCH, f"not in torch {torch.__version__}")
    for name, (module, provider) in PEERS.items():
        try:
            importlib.import_module(module)
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error)
        else:
            found[name] = provider
    if device.type == "cpu":
        found.pop("Liger cross-entropy, mean", None)
        missing["Liger cross-entropy, mean"] = "its Triton kernel needs a GPU"
        if not compiled:
            found.pop("cut-cross-entropy", None)
            missing["cut-cross-entropy"] = "its Triton kernel needs a GPU"
    return found, missing


def step(loss: Loss, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Run forward and backward; returns the loss and the gradients of hidden and weight."""
    batch.hidden.grad = batch.weight.grad = None
    value = loss(batch)
    value.backward()
    return value.detach(), batch.hidden.grad, batch.weight.grad


def errors(loss: Loss, exact: Loss, batch: Batch) -> list[float]:
    """Relative errors ||x - truth|| / ||truth|| of the loss and both gradients."""
    ours = [x.double() for x in step(loss, batch)]
    theirs = [x.double() for x in step(exact, batch)]
    return [((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True)]
