"""The functions of logits: values and gradients of every backend against the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch

from gac_kernels import LossSpec, backends, fused_gac_loss, reference, token_logprobs
from tests.kernels.cases import (
    BY_NAME,
    Case,
    build,
    check,
    check_grads,
    check_outputs,
    each_case,
)

each_backend = pytest.mark.parametrize("backend", ["reference", "native", "triton"], indirect=True)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def loss_and_grad(call, logits, batch, **keywords):
    out = call(logits, batch.targets, batch.advantages, batch.is_demo, **batch.keywords, **keywords)
    # half-precision gradients are rounded before the factor 4, which adds no rounding error
    return out, torch.autograd.grad(out.loss * 4, logits)


def compare(case: Case, dtype: torch.dtype, backend: str, **keywords) -> None:
    batch = build(case, dtype)
    logits = batch.logits()
    doubles = logits.detach().double().requires_grad_()
    truth, d_truth = loss_and_grad(reference.fused_gac_loss, doubles, batch)
    same_dtype, d_same_dtype = loss_and_grad(reference.fused_gac_loss, logits, batch)
    # a non-leaf, because a leaf that is overwritten could not be used again
    out, d_ours = loss_and_grad(fused_gac_loss, logits * 1, batch, backend=backend, **keywords)
    check_outputs(out, same_dtype, truth)
    # Triton's interpreter truncates to bfloat16, whereas the hardware rounds
    truncates = backend == "triton" and dtype == torch.bfloat16 and not torch.cuda.is_available()
    extra_rtol = torch.finfo(dtype).eps / 2 if truncates else 0.0
    check_grads(["logits"], d_ours, d_same_dtype, d_truth, extra_rtol)
    assert d_ours[0].dtype == dtype
    assert out.loss.dtype == out.logps.dtype == out.entropy.dtype == torch.float32
    masked = batch.targets == -100
    assert (out.logps[masked] == 0).all() and (out.entropy[masked] == 0).all()
    assert (d_ours[0][masked] == 0).all()


@each_backend
@each_case
def test_float32(case: Case, backend: str) -> None:
    compare(case, torch.float32, backend)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["k2", "masked-vocab", "wide"])
def test_half(name: str, dtype: torch.dtype, backend: str) -> None:
    compare(BY_NAME[name], dtype, backend)


@each_backend
@pytest.mark.parametrize("name", ["entropy", "packed"])
def test_overwrite_reuses_the_logits_storage(name: str, backend: str) -> None:
    compare(BY_NAME[name], torch.float32, backend, overwrite=True)
    batch = build(BY_NAME[name])
    logits = batch.logits() * 1
    _, (grad,) = loss_and_grad(fused_gac_loss, logits, batch, backend=backend, overwrite=True)
    assert (grad.data_ptr() == logits.data_ptr()) == (backend != "reference")


@each_backend
def test_overwrite_skips_rows_that_share_memory(backend: str) -> None:
    """The rows of an expanded tensor, or overlapping windows, have separate gradients."""
    batch = build(BY_NAME["clip"])
    row = batch.logits().detach()[:, :1].requires_grad_()
    wide = torch.nn.functional.pad(row.detach()[:, 0], (0, 12)).requires_grad_()
    views = {row: lambda x: x.expand(*batch.targets.shape, -1), wide: lambda x: x.unfold(1, 101, 2)}
    if backend == "triton":  # the interpreter is slow
        del views[wide]
    for leaf, view in views.items():

        def grad(overwrite: bool, leaf=leaf, view=view) -> torch.Tensor:
            args = view(leaf * 1), batch.targets, batch.advantages, batch.is_demo
            out = fused_gac_loss(*args, **batch.keywords, backend=backend, overwrite=overwrite)
            return torch.autograd.grad(out.loss, leaf)[0]

        assert torch.equal(grad(True), grad(False))


STRIDED = {
    "slice": lambda x: x[:6, :7, :101],
    "every other row": lambda x: x[:12:2, 1:14:2, 7:108],
    "time major": lambda x: x[:7, :6, :101].transpose(0, 1),
}


@each_backend
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_strided_rows(name: str, overwrite: bool, backend: str) -> None:
    """The logits are a view of a larger buffer, whose rest is neither read nor written."""
    batch, view = build(BY_NAME["clip"]), STRIDED[name]
    logits, buffer = batch.logits(), torch.full((14, 14, 130), torch.nan)
    view(buffer).copy_(logits.detach())
    plain, (d_plain,) = loss_and_grad(fused_gac_loss, logits, batch, backend=backend)
    rows, options = view(buffer).requires_grad_(), {"backend": backend, "overwrite": overwrite}
    out, (d_ours,) = loss_and_grad(fused_gac_loss, rows, batch, **options)
    assert torch.equal(out.loss, plain.loss) and torch.equal(d_ours, d_plain)
    view(buffer).detach().fill_(torch.nan)
    assert buffer.isnan().all()


@each_backend
@each_dtype
@pytest.mark.parametrize("name", ["entropy", "packed", "masked-vocab"])
def test_token_logprobs(name: str, dtype: torch.dtype, backend: str) -> None:
    """Both outputs are differentiable; a row with zero upstream gradient gets a zero gradient."""
    case = BY_NAME[name]
    batch = build(case)
    logits = batch.logits()
    upstream = torch.randn(2, *batch.targets.shape)
    upstream[:, 0] = 0

    def run(call, x, **keywords):
        outputs = call(x, batch.targets, temperature=0.7, **keywords)
        grad_outputs = list(upstream.to(outputs[0].dtype))
        return outputs, torch.autograd.grad(outputs, x, grad_outputs)

    truth, d_truth = run(reference.token_logprobs, logits.detach().double().requires_grad_())
    same_dtype, d_same_dtype = run(reference.token_logprobs, logits)
    ours, d_ours = run(token_logprobs, logits, backend=backend)
    for label, *values in zip(("logps", "entropy"), ours, same_dtype, truth, strict=True):
        check(label, *values)
    check_grads(["logits"], d_ours, d_same_dtype, d_truth)
    assert (d_ours[0][0] == 0).all()


@each_backend
@pytest.mark.parametrize("place", [0, 50, 100, slice(None)], ids=["first", "middle", "last", "row"])
@pytest.mark.parametrize(
    ("bad", "softcap"), [(torch.nan, None), (torch.inf, None), (torch.inf, 3.0)]
)
def test_bad_logits_give_a_nan_loss(bad: float, softcap: float | None, place, backend: str) -> None:
    """As does a row of -inf only."""
    logits, targets = torch.randn(1, 2, 101), torch.tensor([[1, 3]])
    logits[0, 1, place] = -torch.inf if isinstance(place, slice) else bad
    for advantage in (1.0, 0.0):  # with advantage 0, the row has no gradient but is still read
        advantages = torch.full((1, 2), advantage)
        out = fused_gac_loss(logits, targets, advantages, softcap=softcap, backend=backend)
        assert out.loss.isnan() and out.logps[0, 1].isnan() and out.logps[0, 0].isfinite()


@each_backend
def test_a_target_outside_the_vocabulary_is_nan_and_not_read(backend: str) -> None:
    targets = torch.tensor([8, -1, 2**40, 2])
    rows = backends.load(backend, targets.device)
    logps, entropy, lse, *_, is_top1 = rows.row_stats(
        torch.zeros(1, 4, 8), targets, 1.0, None, True
    )
    assert logps[:3].isnan().all() and not is_top1[:3].any()
    torch.testing.assert_close(torch.stack([-logps[3], entropy[3], lse[3]]), lse[:3])


@each_backend
def test_entropy_gradient_with_an_impossible_target(backend: str) -> None:
    """A target of probability 0 adds 0 log 0 = 0 to the entropy, and its gradient is 0."""
    logits = torch.tensor([[[-torch.inf, 0.5, 1.0, -1.0]]])
    grads = []
    for dtype, name in ((torch.float32, backend), (torch.float64, None)):
        leaf = logits.to(dtype).detach().clone().requires_grad_()
        call = reference.token_logprobs if name is None else token_logprobs
        _, entropy = call(leaf, torch.zeros(1, 1).long(), **({"backend": name} if name else {}))
        entropy.sum().backward()
        grads.append(leaf.grad.double())
    assert grads[0][0, 0, 0] == 0 and grads[1].abs().max() > 0.1
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-7)


@each_backend
def test_masked_rows_are_never_read(backend: str, poison: None) -> None:
    batch = build(BY_NAME["entropy"])
    clean = batch.logits()
    dirty = clean.detach().clone()
    dirty[batch.targets == -100] = torch.nan
    dirty.requires_grad_()
    a, (d_a,) = loss_and_grad(fused_gac_loss, clean, batch, backend=backend)
    b, (d_b,) = loss_and_grad(fused_gac_loss, dirty, batch, backend=backend)
    assert torch.equal(a.loss, b.loss) and torch.equal(d_a, d_b)
    assert torch.equal(a.logps, b.logps) and torch.equal(a.entropy, b.entropy)
    assert a.moments.signals() == b.moments.signals()


@each_backend
def test_only_rows_without_an_upstream_gradient_get_zeros(backend: str) -> None:
    """Even if their logits are nan."""
    logits, targets = torch.randn(1, 6, 5), torch.tensor([1, 2, 3, 4, 0, -100])
    logits[0, 0] = torch.nan
    d_logps, d_entropy = torch.tensor([[0.0, 1, -1, 0, 0, 1], [0.0, 0, 0, 1, -1, 1]])
    ones, out = torch.ones(6), torch.full_like(logits, torch.nan)
    rows = backends.load(backend, logits.device)
    rows.row_grads(logits, targets, ones, ones, d_logps, d_entropy, 1.0, out)
    assert (out[0] != 0).any(-1).tolist() == [False, True, True, True, True, False]


@each_backend
@pytest.mark.parametrize(("advantage", "bonus"), [(1.0, 0.0), (0.0, 1.0)])
def test_coefficients_of_exactly_1_are_not_skipped(
    advantage: float, bonus: float, backend: str
) -> None:
    logits, targets = torch.randn(2, 2, 5), torch.randint(5, (2, 2))
    inputs = targets, torch.tensor([advantage, -advantage]), torch.zeros(2).bool()
    keywords = {"mu": 0.0, "rollout_norm": 1.0}
    for coefficient in (bonus, -bonus):
        spec = LossSpec(rollout_reduction="sum", entropy_coef=coefficient)
        leaf = logits.clone().requires_grad_()
        fused_gac_loss(leaf, *inputs, spec=spec, **keywords, backend=backend).loss.backward()
        assert (leaf.grad != 0).any(-1).all()


@each_backend
def test_deterministic(backend: str) -> None:
    batch = build(BY_NAME["wide"])
    logits = batch.logits()
    runs = [loss_and_grad(fused_gac_loss, logits, batch, backend=backend) for _ in range(2)]
    assert torch.equal(runs[0][0].loss, runs[1][0].loss)
    assert torch.equal(runs[0][1][0], runs[1][1][0])


EDGES = {
    "no sequences": ((0, 4), []),
    "no tokens in a row": ((3, 0), [0, 1, 0]),
    "all masked": ((3, 4), [0, 1, 0]),
    "one token": ((1, 1), [0]),
    "no rollouts": ((2, 3), [1, 1]),
    "no demonstrations": ((2, 3), [0, 0]),
}


@each_backend
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, backend: str) -> None:
    """A term without tokens is exactly 0; a batch without tokens has loss 0 and gradient 0."""
    shape, demos = EDGES[name]
    logits = torch.randn(*shape, 11, requires_grad=True)
    targets = torch.randint(0, 11, shape)
    if name == "all masked":
        targets.fill_(-100)
    advantages, is_demo = torch.ones(shape[0]), torch.tensor(demos, dtype=torch.bool)
    out = fused_gac_loss(logits, targets, advantages, is_demo, backend=backend, mu=0.5)
    (grad,) = torch.autograd.grad(out.loss, logits)
    tokens = (targets != -100).sum().item()
    rollouts = tokens > 0 and not all(demos)
    assert (out.rollout_loss != 0).item() is rollouts
    assert (out.demo_loss != 0).item() is (tokens > 0 and any(demos))
    assert out.loss.isfinite() and (grad.abs().sum() > 0).item() is (tokens > 0)
    signals = out.moments.signals()
    assert (signals.rl_variance == signals.rl_variance) is rollouts  # nan without rollouts
    assert out.kl.isnan()


@each_backend
@pytest.mark.parametrize("mu", [0.0, 1.0, torch.tensor(0.0), torch.tensor(1.0)])
def test_mu_of_0_or_1_removes_a_term(mu: float | torch.Tensor, backend: str) -> None:
    batch = build(BY_NAME["defaults"])
    logits = batch.logits()
    batch.keywords["mu"] = mu
    out, (grad,) = loss_and_grad(fused_gac_loss, logits, batch, backend=backend)
    removed = ~batch.is_demo if mu == 1 else batch.is_demo
    remaining_loss = out.demo_loss if mu == 1 else out.rollout_loss
    assert torch.equal(out.loss, remaining_loss)
    assert (grad[removed] == 0).all() and (grad[~removed].abs().sum() > 0).item()


@each_backend
def test_float16_gradients_of_large_advantages_do_not_overflow(backend: str) -> None:
    """Only the intermediate gradient exceeds float16's range.

    It is 12,000 (advantage) / 0.05 (temperature) / 2 (1 - p) = 120,000; divided by 30 (tokens times
    norm), the result is 4,000.
    """
    logits = torch.zeros(1, 2, 2, dtype=torch.float16, requires_grad=True)
    targets, spec = torch.tensor([[1, 1]]), LossSpec(temperature=0.05)
    out = fused_gac_loss(
        logits,
        targets,
        torch.tensor([-12e3]),
        torch.tensor([False]),
        mu=0.0,
        spec=spec,
        rollout_norm=15.0,
        backend=backend,
    )
    (grad,) = torch.autograd.grad(out.loss, logits)
    torch.testing.assert_close(
        grad.float(), torch.tensor([-4e3, 4e3]).expand(1, 2, 2), rtol=2e-3, atol=0.0
    )


@each_backend
@pytest.mark.parametrize("advantage", [-1e4, 1e4])
@pytest.mark.parametrize("gap", [39.0, 41.0, 90.0, 1e4])
def test_extreme_ratios_are_clamped(gap: float, advantage: float, backend: str) -> None:
    """Ratios are clamped to e^40, with zero gradient above that, in every dtype and backend."""
    logits, batch, keywords = unlikely_token(old=gap)
    batch[1][:] = advantage
    keywords["spec"] = LossSpec(clip_low=None, clip_high=None)
    truth, d_truth = loss_and_logits_grad(logits, batch, keywords, "reference")
    out, grad = loss_and_logits_grad(logits.float(), batch, keywords, backend)
    assert out.loss.item() == pytest.approx(truth.loss.item(), rel=1e-4)
    assert out.loss.item() == pytest.approx(-advantage * math.exp(min(gap, 40)) / 2, rel=1e-4)
    assert (grad[0, 0] != 0).all() == (gap < 40)
    torch.testing.assert_close(grad.double(), d_truth, rtol=1e-4, atol=1e-2)


@each_backend
@pytest.mark.parametrize("gap", [39.0, 41.0])
def test_a_clamped_ratio_weighs_the_kl_like_a_constant(gap: float, backend: str) -> None:
    logits, batch, keywords = unlikely_token(old=gap, ref=2.0)
    keywords["spec"] = LossSpec(kl_coef=0.1, use_bias_correction_kl=True)
    _, truth = loss_and_logits_grad(logits, batch, keywords, "reference")
    _, grad = loss_and_logits_grad(logits.float(), batch, keywords, backend)
    torch.testing.assert_close(grad.double(), truth, rtol=1e-4, atol=1e-2)


@each_backend
@pytest.mark.parametrize("coefficient", [0.1, 0.0])
def test_a_k3_overflow_makes_loss_and_gradient_non_finite(coefficient: float, backend: str) -> None:
    """But not if the KL is only reported."""
    logits, batch, keywords = unlikely_token(ref=100.0)
    keywords["spec"] = LossSpec(kl_coef=coefficient)
    out, grad = loss_and_logits_grad(logits.float(), batch, keywords, backend)
    assert out.kl == torch.inf and out.loss.isfinite() == (coefficient == 0)
    assert grad.isfinite().all() == (coefficient == 0)


@each_backend
def test_the_ratio_to_the_log_probs_of_the_same_logits_is_exactly_1(backend: str) -> None:
    """The previous call's outputs are old and reference log-probs; neither bound leaves a gap."""
    batch = build(BY_NAME["entropy"])
    spec = LossSpec(clip_low=0.0, clip_high=0.0, temperature=0.7)
    args = batch.logits(), batch.targets, batch.advantages, batch.is_demo
    logps = fused_gac_loss(*args, spec=spec, backend=backend, mu=0.5).logps
    columns = {"old_logps": logps, "ref_logps": logps}
    out = fused_gac_loss(*args, spec=spec, backend=backend, **columns, mu=0.5)
    assert out.clip_fraction == 0 and out.kl == 0


def unlikely_token(old: float = 0.0, ref: float = 0.0):
    """Build a rollout of two tokens; the first has the given logp - old and ref - logp."""
    logits = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(0)).double()
    targets = torch.tensor([[1, 3]])
    logps, _ = token_logprobs(logits, targets, backend="reference")
    first = torch.tensor([[1.0, 0.0]])
    keywords = {
        "mu": 0.0,
        "spec": LossSpec(kl_coef=0.1),
        "old_logps": (logps - old * first).float(),
        "ref_logps": (logps + ref * first).float(),
    }
    return logits, (targets, torch.ones(1), torch.tensor([False])), keywords


def loss_and_logits_grad(logits, batch, keywords, backend):
    """Return the outputs and the gradient with respect to the logits."""
    leaf = logits.detach().requires_grad_()
    same_dtype = {
        k: x.to(leaf.dtype) if isinstance(x, torch.Tensor) else x for k, x in keywords.items()
    }
    out = fused_gac_loss(leaf, *batch, **same_dtype, backend=backend)
    return out, torch.autograd.grad(out.loss, leaf)[0]


@each_backend
def test_float16_gradients_of_a_long_mean_do_not_vanish(backend: str) -> None:
    """With demo_norm = 2^24, float16 gradients of order 2^-24 underflow unless they are scaled."""
    logits = torch.randn(2, 3, 11, dtype=torch.float16, requires_grad=True)
    targets, is_demo = torch.randint(0, 11, (2, 3)), torch.tensor([True, True])
    spec = LossSpec(demo_weight="one")

    def grad(call, x, **keywords):
        out = call(
            x, targets, torch.ones(2), is_demo, mu=1.0, spec=spec, demo_norm=2.0**24, **keywords
        )
        return torch.autograd.grad(out.loss * 2.0**24, x)[0]

    truth = grad(reference.fused_gac_loss, logits.detach().double().requires_grad_())
    ours = grad(fused_gac_loss, logits, backend=backend)
    torch.testing.assert_close(ours.double(), truth, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("backend", ["native", "triton"], indirect=True)
def test_overwritten_logits_cannot_be_used_by_another_backward(backend: str) -> None:
    """Without the error, other operations that saved the logits would read gradients instead."""
    batch = build(BY_NAME["defaults"])
    logits = batch.logits() * 1
    squares = logits.square()  # saves the logits
    args = batch.targets, batch.advantages, batch.is_demo
    fused_gac_loss(logits, *args, **batch.keywords, backend=backend, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


@pytest.mark.parametrize("backend", ["native", "reference", "triton"])
def test_weight_or_advantage_0_removes_an_impossible_token(backend: str) -> None:
    """The token's log-probability is -inf; its loss is 0, not nan."""
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 1] = -torch.inf
    logits.requires_grad_()
    targets, share = torch.tensor([[1, 2]]), torch.tensor([[0.0, 1.0]])
    for demo, policy, weights, advantages in (
        (True, "clip", share, torch.ones(1)),
        (False, "reinforce", share, torch.ones(1)),
        (False, "reinforce", None, share),
        (False, "cispo", None, share),
    ):
        spec = LossSpec(policy_loss=policy, demo_weight="one")
        arguments = logits, targets, advantages, torch.tensor([demo])
        keywords = {"weights": weights, "old_logps": -torch.ones(1, 2), "spec": spec}
        out = fused_gac_loss(*arguments, **keywords, backend=backend, mu=0.5)
        (grad,) = torch.autograd.grad(out.loss, logits)
        assert out.loss.isfinite() and (grad[0, 0] == 0).all() and (grad[0, 1] != 0).any()
