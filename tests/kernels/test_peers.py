"""Other libraries' losses give the same results on the same inputs.

Each library is optional: if it cannot be imported, its tests are skipped with the reason.
"""

import importlib
from collections.abc import Iterable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gac_kernels import (
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    token_logprobs,
)

B, T, H, V = 3, 5, 16, 203


def import_or_skip(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        return pytest.skip(f"{module}: {error}")


def assert_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Assert equality up to a few float32 rounding errors."""
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


@pytest.fixture
def head() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Leaf tensors hidden [B, T, H], weight [V, H] and bias [V]; targets with masked tokens."""
    hidden, weight, bias = torch.randn(B, T, H), torch.randn(V, H) / 4, torch.randn(V) / 4
    targets = torch.randint(0, V, (B, T))
    targets[0, 3:] = targets[2, 4:] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


@pytest.fixture
def old_and_ref(head) -> tuple[Tensor, Tensor]:
    """old_logps and ref_logps that make some ratios reach each clip bound."""
    hidden, weight, bias, targets = head
    with torch.no_grad():
        logps, _ = linear_token_logprobs(hidden, weight, targets, bias=bias)
    return logps + torch.randn(B, T) / 2, logps + torch.randn(B, T) / 2


GRPO = {
    # Liger's name for the reduction, our LossSpec, and Liger's other options
    "sequence means": ("grpo", LossSpec(kl_coef=0.04), {}),
    "token mean, clip-higher": (
        "bnpo",
        LossSpec(clip_high=0.28, kl_coef=0.04, rollout_reduction="token"),
        {"epsilon_high": 0.28},
    ),
    "constant": (
        "dr_grpo",
        LossSpec(kl_coef=0.04, rollout_reduction="constant", max_tokens=9),
        {"max_completion_length": 9},
    ),
    "dual clip, temperature": (
        "grpo",
        LossSpec(kl_coef=0.04, dual_clip=1.3, temperature=0.7),
        {"delta": 1.3, "temperature": 0.7},
    ),
}


@pytest.mark.parametrize("name", GRPO)
def test_liger_fused_linear_grpo(name: str, head, old_and_ref) -> None:
    liger = import_or_skip("liger_kernel.chunked_loss.grpo_loss")
    kind, spec, options = GRPO[name]
    hidden, weight, bias, targets = head
    old, ref = old_and_ref
    advantages = torch.tensor([1.5, -1.0, 0.5])
    mask = (targets != -100).float()
    loss, metrics = liger.LigerFusedLinearGRPOLoss(
        beta=0.04, compiled=False, use_ref_model=True, loss_type=kind, **options
    )(hidden, weight, targets.clamp(min=0), mask, advantages, bias, ref, old)
    out = fused_linear_gac_loss(
        hidden,
        weight,
        targets,
        advantages,
        torch.zeros(B, dtype=torch.bool),
        bias=bias,
        mu=0.0,
        old_logps=old,
        ref_logps=ref,
        spec=spec,
    )
    leaves = hidden, weight, bias
    assert_same([out.loss], [loss])
    assert_same(torch.autograd.grad(out.loss, leaves), torch.autograd.grad(loss, leaves))
    assert_same([out.kl], metrics[:1])
    if spec.dual_clip is None:  # Liger's clip fraction does not count tokens clipped by delta
        assert_same([out.clip_fraction], metrics[1:])
        assert 0 < out.clip_fraction < 1


def test_liger_grpo_on_logits(head, old_and_ref) -> None:
    liger = import_or_skip("liger_kernel.transformers.grpo_loss")
    hidden, weight, _, targets = head
    old, ref = old_and_ref
    advantages = torch.tensor([1.5, -1.0, 0.5])
    logits = (hidden @ weight.T).detach()
    # Liger expects unshifted logits, which are one position longer
    unshifted = torch.nn.functional.pad(logits, (0, 0, 0, 1)).requires_grad_()
    loss, _ = liger.triton_grpo_loss(
        unshifted,
        old,
        ref,
        targets.clamp(min=0),
        advantages,
        completion_mask=(targets != -100).int(),
        temperature=0.9,
        beta=0.04,
        eps_low=0.2,
        eps_high=0.4,
        inplace=False,
        loss_type="grpo",
        reduce=True,
    )
    logits.requires_grad_()
    out = fused_gac_loss(
        logits,
        targets,
        advantages,
        torch.zeros(B, dtype=torch.bool),
        mu=0.0,
        old_logps=old,
        ref_logps=ref,
        spec=LossSpec(0.2, 0.4, kl_coef=0.04, temperature=0.9),
    )
    (theirs,) = torch.autograd.grad(loss, unshifted)
    assert_same([out.loss, torch.autograd.grad(out.loss, logits)[0]], [loss, theirs[:, :-1]])


def demonstrations(head, weight: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute our loss, a token mean, and its gradients on demonstrations only."""
    hidden, matrix, bias, targets = head
    out = fused_linear_gac_loss(
        hidden,
        matrix,
        targets,
        torch.ones(B),
        torch.ones(B, dtype=torch.bool),
        bias=bias,
        mu=1.0,
        spec=LossSpec(demo_weight=weight),
    )
    return out.loss, torch.autograd.grad(out.loss, (hidden, matrix, bias))


@pytest.mark.parametrize("weight", ["one", "p"])
def test_liger_fused_linear_cross_entropy(weight: str, head) -> None:
    """The weight p is Liger's `use_token_scaling` (DFT)."""
    liger = import_or_skip("liger_kernel.transformers.fused_linear_cross_entropy")
    hidden, matrix, bias, targets = head
    call = liger.LigerFusedLinearCrossEntropyLoss(use_token_scaling=weight == "p")
    loss = call(matrix, hidden.flatten(0, 1), targets.flatten(), bias)
    ours, grads = demonstrations(head, weight)
    assert_same([ours, *grads], [loss, *torch.autograd.grad(loss, (hidden, matrix, bias))])


def test_liger_cross_entropy(head) -> None:
    liger = import_or_skip("liger_kernel.transformers.cross_entropy")
    hidden, matrix, bias, targets = head
    logits = torch.nn.functional.linear(hidden, matrix, bias).detach().requires_grad_()
    out = fused_gac_loss(
        logits,
        targets,
        torch.ones(B),
        torch.ones(B, dtype=torch.bool),
        mu=1.0,
        spec=LossSpec(demo_weight="one"),
    )
    (ours,) = torch.autograd.grad(out.loss, logits)
    copy = logits.detach().clone().requires_grad_()  # Liger overwrites its input
    loss = liger.LigerCrossEntropyLoss()((copy * 1).flatten(0, 1), targets.flatten())
    assert_same([out.loss, ours], [loss, torch.autograd.grad(loss, copy)[0]])


def test_torch_linear_cross_entropy(head) -> None:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch.nn.functional.linear_cross_entropy requires torch 2.13")
    hidden, matrix, bias, targets = head
    loss = torch.nn.functional.linear_cross_entropy(
        hidden.flatten(0, 1), matrix, targets.flatten(), linear_bias=bias
    )
    ours, grads = demonstrations(head, "one")
    assert_same([ours, *grads], [loss, *torch.autograd.grad(loss, (hidden, matrix, bias))])


def test_cut_cross_entropy(head) -> None:
    cce = import_or_skip("cut_cross_entropy")
    hidden, matrix, _, targets = head
    # the library's only CPU implementation uses torch.compile, which takes 40 s
    with torch.compiler.set_stance("force_eager"):
        loss = cce.linear_cross_entropy(hidden, matrix, targets, impl="torch_compile")
        theirs = torch.autograd.grad(loss, (hidden, matrix))
    out = fused_linear_gac_loss(
        hidden,
        matrix,
        targets,
        torch.ones(B),
        torch.ones(B, dtype=torch.bool),
        mu=1.0,
        spec=LossSpec(demo_weight="one"),
    )
    assert_same([out.loss, *torch.autograd.grad(out.loss, (hidden, matrix))], [loss, *theirs])


def test_trl_chunked_log_probabilities(head) -> None:
    trl = import_or_skip("trl.kernels.chunked_logprob")
    hidden, matrix, bias, targets = head
    mask = targets != -100
    grad_outputs = torch.randn(2, int(mask.sum()))
    logps, entropy, *_ = trl.ChunkedLogProbFunction.apply(
        hidden[mask], matrix, bias, targets[mask], 0.7, 64
    )
    ours = linear_token_logprobs(hidden, matrix, targets, bias=bias, temperature=0.7)
    ours = [x[mask] for x in ours]
    assert_same(ours, [logps, entropy])
    leaves = hidden, matrix, bias
    assert_same(
        torch.autograd.grad(ours, leaves, list(grad_outputs)),
        torch.autograd.grad([logps, entropy], leaves, list(grad_outputs)),
    )


def test_trl_log_softmax_and_entropy(head) -> None:
    trl = import_or_skip("trl.kernels.logprob_entropy")
    hidden, matrix, _, targets = head
    logits = (hidden @ matrix.T).detach().requires_grad_()
    mask = targets != -100
    grad_outputs = torch.randn(2, B, T) * mask
    theirs = trl.selective_log_softmax_and_entropy(
        logits, targets.clamp(min=0), temperature=0.7, row_mask=mask
    )
    ours = token_logprobs(logits, targets, temperature=0.7)
    assert_same([x[mask] for x in ours], [x[mask] for x in theirs])
    assert_same(
        torch.autograd.grad(ours, logits, list(grad_outputs)),
        torch.autograd.grad(theirs, logits, list(grad_outputs)),
    )
