"""The functions of logits: values and gradients of every backend against the float64 reference."""

import pytest
import torch

from gac_kernels import backends, fused_gac_loss, reference, token_logprobs
from gac_kernels.tokens import Scaling, Upstream
from tests.kernels.cases import (
    BY_NAME,
    Case,
    build,
    check,
    check_grads,
    check_outputs,
    each_backend,
    each_case,
    loss_and_grad,
    on_cuda,
)

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def compare(case: Case, dtype: torch.dtype, backend: str, **keywords) -> None:
    batch = build(case, dtype)
    logits = batch.logits()
    truth, d_truth = loss_and_grad(
        reference.fused_gac_loss, logits.detach().double().requires_grad_(), batch
    )
    same_dtype, d_same_dtype = loss_and_grad(reference.fused_gac_loss, logits, batch)
    # a non-leaf, because a leaf that is overwritten could not be used again
    out, d_ours = loss_and_grad(fused_gac_loss, logits * 1, batch, backend=backend, **keywords)
    # in base 2, log-probs near 0 have the rounding of the logits
    check_outputs(out, same_dtype, truth, floor=1.0 if on_cuda(backend) else 1e-3)
    # Triton's interpreter truncates to bfloat16, whereas the hardware rounds
    truncates = backend == "triton" and dtype == torch.bfloat16 and not torch.cuda.is_available()
    extra_rtol = torch.finfo(dtype).eps if truncates else 0.0
    check_grads(
        ["logits"], d_ours, d_same_dtype, d_truth, extra_rtol, 0.1 if on_cuda(backend) else 1e-3
    )
    assert d_ours[0].dtype == dtype
    assert out.loss.dtype == out.logps.dtype == out.entropy.dtype == torch.float32
    masked = batch.targets == -100
    assert (out.logps[masked] == 0).all()
    assert (out.entropy[masked] == 0).all()
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
    assert grad.data_ptr() == logits.data_ptr()


@each_backend
def test_overwrite_skips_rows_that_share_memory(backend: str) -> None:
    """The rows of an expanded tensor, or overlapping windows, have separate gradients."""
    batch = build(BY_NAME["clip"])
    row = batch.logits().detach()[:, :1].requires_grad_()
    wide = torch.nn.functional.pad(row.detach()[:, 0], (0, 6)).requires_grad_()
    views = {row: lambda x: x.expand(*batch.targets.shape, -1), wide: lambda x: x.unfold(1, 101, 2)}
    if backend == "triton":  # the interpreter is slow
        del views[wide]
    for leaf, view in views.items():

        def grad(overwrite: bool, leaf=leaf, view=view) -> torch.Tensor:
            rows, options = view(leaf * 1), {"backend": backend, "overwrite": overwrite}
            out = fused_gac_loss(rows, *batch.inputs, **batch.keywords, **options)
            return torch.autograd.grad(out.loss, leaf)[0]

        assert torch.equal(grad(True), grad(False))


STRIDED = {
    "slice": lambda x: x[:6, :4, :101],
    "every other row": lambda x: x[:12:2, 1:8:2, 7:108],
    "time major": lambda x: x[:4, :6, :101].transpose(0, 1),
}


@each_backend
@pytest.mark.parametrize("name", STRIDED)
def test_strided_rows(name: str, backend: str) -> None:
    """The logits are a view of a larger buffer, whose rest is neither read nor written."""
    batch, view = build(BY_NAME["clip"]), STRIDED[name]
    logits, buffer = batch.logits(), torch.full((12, 8, 130), torch.nan)
    view(buffer).copy_(logits.detach())
    plain, (d_plain,) = loss_and_grad(fused_gac_loss, logits, batch, backend=backend)
    # CUDA's order of summation follows the alignment of the row
    exact = {"rtol": 1e-6, "atol": 1e-7} if on_cuda(backend) else {"rtol": 0, "atol": 0}
    for overwrite in (False, True):
        rows, options = view(buffer).requires_grad_(), {"backend": backend, "overwrite": overwrite}
        out, (d_ours,) = loss_and_grad(fused_gac_loss, rows, batch, **options)
        torch.testing.assert_close((out.loss, d_ours), (plain.loss, d_plain), **exact)
    view(buffer).detach().fill_(torch.nan)
    assert buffer.isnan().all()


@each_backend
@each_dtype
@pytest.mark.parametrize("name", ["entropy", "packed", "masked-tiles"])
def test_token_logprobs(name: str, dtype: torch.dtype, backend: str) -> None:
    """Both outputs are differentiable; a row with zero upstream gradient gets a zero gradient."""
    batch = build(BY_NAME[name])
    logits = batch.logits()
    upstream = torch.randn(2, *batch.targets.shape)
    upstream[:, 0] = 0

    def run(call, x, **keywords):
        outputs = call(x, batch.targets, temperature=0.7, **keywords)
        return outputs, torch.autograd.grad(outputs, x, list(upstream.to(outputs[0].dtype)))

    truth, d_truth = run(reference.token_logprobs, logits.detach().double().requires_grad_())
    same_dtype, d_same_dtype = run(reference.token_logprobs, logits)
    ours, d_ours = run(token_logprobs, logits, backend=backend)
    for label, *values in zip(("logps", "entropy"), ours, same_dtype, truth, strict=True):
        check(label, *values)
    check_grads(["logits"], d_ours, d_same_dtype, d_truth)
    assert (d_ours[0][0] == 0).all()


@each_backend
def test_masked_rows_are_never_read(backend: str, poison: None) -> None:
    batch = build(BY_NAME["entropy"])
    clean = batch.logits()
    dirty = clean.detach().clone()
    dirty[batch.targets == -100] = torch.nan
    dirty.requires_grad_()
    a, (d_a,) = loss_and_grad(fused_gac_loss, clean, batch, backend=backend)
    b, (d_b,) = loss_and_grad(fused_gac_loss, dirty, batch, backend=backend)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(d_a, d_b)
    assert torch.equal(a.logps, b.logps)
    assert torch.equal(a.entropy, b.entropy)
    assert a.moments.signals() == b.moments.signals()


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
    # exp saves its result, which no gradient overwrites
    out = fused_gac_loss(logits.exp(), targets, advantages, is_demo, backend=backend, mu=0.5)
    (grad,) = torch.autograd.grad(out.loss, logits)
    tokens = (targets != -100).sum().item()
    rollouts = tokens > 0 and not all(demos)
    assert (out.rollout_loss != 0).item() is rollouts
    assert (out.demo_loss != 0).item() is (tokens > 0 and any(demos))
    assert out.loss.isfinite()
    assert (grad.abs().sum() > 0).item() is (tokens > 0)
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
    assert torch.equal(out.loss, out.demo_loss if mu == 1 else out.rollout_loss)
    assert (grad[removed] == 0).all()
    assert (grad[~removed].abs().sum() > 0).item()


@pytest.mark.parametrize("backend", ["native", "triton", "cuda"], indirect=True)
def test_overwritten_logits_cannot_be_used_by_another_backward(backend: str) -> None:
    """Without the error, other operations that saved the logits would read gradients instead.

    The reference does not overwrite them.
    """
    batch = build(BY_NAME["defaults"])
    logits = batch.logits() * 1
    squares = logits.square()  # saves the logits
    fused_gac_loss(logits, *batch.inputs, **batch.keywords, backend=backend, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


@each_backend
@pytest.mark.parametrize("name", ["k3", "corrected on-policy"])
def test_columns_with_a_stride(name: str, backend: str) -> None:
    """The columns have stride 2, but the kernels assume contiguous ones."""
    batch = build(BY_NAME[name])
    logits = batch.logits()
    plain, (d_plain,) = loss_and_grad(fused_gac_loss, logits, batch, backend=backend)
    strided = lambda x: torch.stack([x, torch.zeros_like(x)], -1)[..., 0]  # noqa: E731 - short
    batch.targets = strided(batch.targets)
    columns = ("old_logps", "ref_logps", "rollout_logps", "weights")
    given = {n: x for n in columns if (x := batch.keywords.get(n)) is not None}
    batch.keywords |= {n: strided(x) for n, x in given.items()}
    out, (grad,) = loss_and_grad(fused_gac_loss, logits, batch, backend=backend)
    assert torch.equal(out.loss, plain.loss)
    assert torch.equal(grad, d_plain)


@each_backend
@pytest.mark.parametrize("vocab", [7, 64, 101, 2049])
def test_gradient_in_a_narrower_dtype(vocab: int, backend: str, poison: None) -> None:
    """The fused linear loss keeps float32 logits, but its GEMMs need a narrower gradient."""
    logits, targets = torch.randn(2, 3, vocab), torch.randint(vocab, (6,))
    rows = backends.load(backend, logits.device)
    _, entropy, lse = rows.row_stats(logits, targets, Scaling(0.8))
    upstream = Upstream(lse, entropy, *torch.randn(2, 6))
    arguments = logits, targets, Scaling(0.8), upstream
    exact = torch.empty_like(logits)
    wide = torch.full((2, 3, vocab + 5), 7.0, dtype=torch.bfloat16)
    rows.row_grads(*arguments, exact)
    rows.row_grads(*arguments, wide[..., :vocab])
    # the interpreter truncates; CUDA's order of summation follows the alignment of the row
    ulps = 2**-7 if backend == "triton" else 1.01 * 2**-8
    torch.testing.assert_close(wide[..., :vocab].float(), exact, rtol=ulps, atol=1e-30)
    assert (wide[..., vocab:] == 7).all()
    longer, part = (*arguments[:3], upstream._replace(lse=lse + 1)), torch.empty_like(logits)
    rows.row_grads(*longer, part, whole_row=False)  # of a row that goes on elsewhere
    backends.load("reference", logits.device).row_grads(*longer, exact)
    torch.testing.assert_close(part, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "native", "cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_round_to_even(dtype: torch.dtype, backend: str) -> None:
    """With two equal logits, the gradient is half of d_logp. The interpreter truncates."""
    rows, steps = backends.load(backend, torch.device("cpu")), torch.arange(1.0, 16, 2)
    d_logp, out = 1 + steps * torch.finfo(dtype).eps / 2, torch.zeros(8, 1, 2, dtype=dtype)
    logits, targets = torch.zeros(8, 1, 2), torch.zeros(8, dtype=torch.long)
    _, entropy, lse = rows.row_stats(logits, targets, Scaling(1.0))
    rows.row_grads(logits, targets, Scaling(1.0), Upstream(lse, entropy, d_logp, 0 * d_logp), out)
    assert torch.equal(out[:, 0, 0], (d_logp / 2).to(dtype))


@pytest.mark.parametrize("backend", ["reference", "native", "triton"], indirect=True)
@each_dtype
def test_scaling_in_place(dtype: torch.dtype, backend: str) -> None:
    """CUDA uses Triton's function."""
    flat, wide, columns = (torch.randn(*s).to(dtype) for s in ((10_007,), (2, 3, 20), (4, 6)))
    transposed = torch.randn(2, 3, 4).to(dtype).transpose(1, 2)
    for tensor in (flat, wide[:, ::2, 3:17], columns.t(), transposed, flat[:0]):
        expected, before = (tensor.float() * 0.3).to(dtype), wide.clone()
        backends.load(backend, tensor.device).scale_(tensor, torch.tensor(0.3))
        truncates = backend == "triton" and dtype == torch.bfloat16  # the interpreter
        torch.testing.assert_close(tensor, expected, rtol=2**-7 if truncates else 0, atol=0)
        assert torch.equal(wide[:, 1], before[:, 1])
