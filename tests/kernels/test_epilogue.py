"""The epilogue head, in Triton's interpreter, against float64.

Its GEMM takes bfloat16, which the interpreter has only as `bench.interpreter` patches it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gac_kernels import (
    LossSpec,
    epilogue,
    fused_linear_gac_loss,
    fused_linear_token_loss,
    linear_token_logprobs,
    projection,
    reference,
)
from gac_kernels.tokens import Scaling, Upstream
from tests.kernels.cases import (
    BY_NAME,
    CASES,
    LEAVES,
    Case,
    build,
    check_grads,
    check_outputs,
    require_backend,
    run_linear,
)
from tests.kernels.emulated_gemm import emulate

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
exponentials = pytest.importorskip("gac_kernels.backends.triton.exponentials")
BFLOAT16 = torch.bfloat16
EPS = torch.finfo(BFLOAT16).eps


@pytest.fixture(autouse=True)
def heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[epilogue.EpilogueHead]]:
    """Use the epilogue head on a CPU, with small tiles; collects the heads that were made."""
    require_backend("triton")
    emulate(monkeypatch, BFLOAT16)
    tiles = exponentials.Tiles(rows=16, columns=64, depth=32, group=2, block=64)
    monkeypatch.setattr(exponentials, "TILES", tiles)
    monkeypatch.setattr(epilogue, "device_error", lambda device: None)
    monkeypatch.setattr(projection, "ROW_MULTIPLE", {"cpu": (64, 1)})
    monkeypatch.setenv("GAC_HEAD", "epilogue")
    made, init = [], epilogue.EpilogueHead.__init__

    def recorded(self: epilogue.EpilogueHead, *arguments: object) -> None:
        made.append(self)
        init(self, *arguments)

    monkeypatch.setattr(epilogue.EpilogueHead, "__init__", recorded)
    return made


def chunk_bytes(vocabulary: int, rows: int = 7) -> int:
    """Memory for chunks of so many rows, without a cost for their hidden states."""
    return rows * 2 * (vocabulary + 100)


FAST = {
    "packed",
    "all options",
    "entropy",
    "peaked logits",
    "one entry",
    "corrected on-policy",
}
FULL = pytest.mark.full(reason="the fast cases cover every path")


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=() if x.name in FAST else FULL, id=x.name) for x in CASES],
)
def test_values_and_gradients(case: Case, poison: None, heads: list) -> None:
    """Several chunks. Exponents are relative to the target, so that the rounding of an entropy is
    that of the target's log-prob.
    """
    batch = build(case, BFLOAT16)
    truth, d_truth = run_linear(reference.fused_linear_gac_loss, batch.to(torch.float64))
    same_dtype, d_same_dtype = run_linear(reference.fused_linear_gac_loss, batch)
    out, d_ours = run_linear(
        fused_linear_gac_loss, batch, backend="triton", chunk_bytes=chunk_bytes(case.vocabulary)
    )
    assert len(heads) == (case.name != "softcap")  # see below
    check_outputs(out, same_dtype, truth, floor=max(1.0, truth.logps.abs().max().item()))
    check_grads(LEAVES, d_ours, d_same_dtype, d_truth, EPS)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_two_passes_and_temperatures_per_token(level: str, heads: list) -> None:
    spec = replace(BY_NAME["k2"].spec, importance_sampling_level=level)
    batch = build(replace(BY_NAME["k2"], spec=spec), BFLOAT16)
    batch.keywords["temperatures"] = torch.rand(batch.targets.shape) + 0.5
    truth, d_truth = run_linear(reference.fused_linear_gac_loss, batch.to(torch.float64))
    same_dtype, d_same_dtype = run_linear(reference.fused_linear_gac_loss, batch)
    out, d_ours = run_linear(
        fused_linear_gac_loss, batch, backend="triton", chunk_bytes=chunk_bytes(101)
    )
    assert len(heads) == 1
    check_outputs(out, same_dtype, truth)
    check_grads(LEAVES, d_ours, d_same_dtype, d_truth, EPS)


def test_logprobs(heads: list) -> None:
    """Entropies, and a token without an upstream gradient."""
    batch = build(BY_NAME["entropy"], BFLOAT16)
    upstream = torch.linspace(-1, 1, batch.targets.numel()).view_as(batch.targets)
    upstream[0, 1] = 0

    def grads(call, x, **keywords) -> tuple[Tensor, ...]:
        logps, entropy = call(x.hidden, x.weight, x.targets, bias=x.bias, **keywords)
        total = (upstream * (2 * logps - entropy.square())).mean()
        return torch.autograd.grad(total, (x.hidden, x.weight, x.bias))

    truth = grads(reference.linear_token_logprobs, batch.to(torch.float64))
    same_dtype = grads(reference.linear_token_logprobs, batch)
    ours = grads(linear_token_logprobs, batch, backend="triton", chunk_bytes=chunk_bytes(101))
    assert len(heads) == 2
    check_grads(LEAVES, ours, same_dtype, truth, EPS)


def test_token_loss(heads: list) -> None:
    """A loss whose derivatives are 0 for some tokens, which leave their chunk."""
    batch = build(BY_NAME["k2"], BFLOAT16)

    def loss(logps: Tensor, entropy: Tensor) -> Tensor:
        return torch.where(logps < -4, logps.exp() - 0.1 * entropy, 0)

    def grads(call, x, **keywords) -> tuple[Tensor, ...]:
        out = call(x.hidden, x.weight, x.targets, loss, bias=x.bias, **keywords)
        return torch.autograd.grad(out[0], (x.hidden, x.weight, x.bias))

    truth = grads(reference.fused_linear_token_loss, batch.to(torch.float64))
    same_dtype = grads(reference.fused_linear_token_loss, batch)
    ours = grads(fused_linear_token_loss, batch, backend="triton", chunk_bytes=chunk_bytes(101))
    assert len(heads) == 1
    check_grads(LEAVES, ours, same_dtype, truth, EPS)


def test_softcap_and_logit_scale(heads: list) -> None:
    """Without a gradient of the entropy, which a softcap excludes."""
    case = replace(BY_NAME["softcap"], spec=LossSpec(temperature=0.8))
    batch = build(case, BFLOAT16)
    truth, d_truth = run_linear(reference.fused_linear_gac_loss, batch.to(torch.float64))
    same_dtype, d_same_dtype = run_linear(reference.fused_linear_gac_loss, batch)
    out, d_ours = run_linear(fused_linear_gac_loss, batch, backend="triton")
    assert len(heads) == 1
    check_outputs(out, same_dtype, truth, floor=1.0)
    check_grads(LEAVES, d_ours, d_same_dtype, d_truth, EPS)


V, H, M = 101, 24, 21


class Rows:
    """Rows of a head for the kernels alone, with upstream gradients."""

    def __init__(self, scale: float = 1.0, softcap: float | None = None) -> None:
        g = torch.Generator().manual_seed(1)
        self.hidden = (torch.randn(M, H, generator=g) * scale).to(BFLOAT16)
        self.weight = (torch.randn(V, H, generator=g) / H**0.5).to(BFLOAT16)
        self.bias = torch.zeros(V)
        self.targets = torch.randint(V, (M,), generator=g)
        self.scaling = Scaling(1.0, softcap)
        self.d_logps, self.d_entropy = torch.randn(2, M, generator=g)

    def ours(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """The statistics, and the gradient of the logits."""
        factors = torch.full((M,), torch.nan)
        values = torch.full((M, 128), torch.nan, dtype=BFLOAT16)[:, :V]
        rows = exponentials.exponentials(
            rows=self.hidden,
            weight=self.weight,
            bias=self.bias,
            targets=self.targets,
            scaling=self.scaling,
            values=values,
            tokens=torch.arange(M),
            factors=factors,
        )
        stats = rows.logps, rows.entropy, rows.lse
        upstream = Upstream(rows.lse, rows.entropy, self.d_logps, self.d_entropy)
        exponentials.finish(rows, self.targets, self.scaling, upstream)
        return stats, values.double() * factors.double()[:, None]

    def truth(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """The same in float64."""
        logits = reference.linear_logits(
            self.hidden.double(), self.weight.double(), self.bias.double()
        )
        stats = reference.row_stats(logits, self.targets, self.scaling)
        upstream = Upstream(stats[2], stats[1], self.d_logps.double(), self.d_entropy.double())
        out = torch.empty(1, M, V, dtype=torch.float64)
        reference.row_grads(logits[None], self.targets, self.scaling, upstream, out)
        return stats, out[0]

    def check(self, tolerance: float = 1e-5) -> None:
        """Compare the statistics, and each row of the gradient relative to its largest entry."""
        (stats, grad), (true_stats, true_grad) = self.ours(), self.truth()
        for value, truth in zip(stats, true_stats, strict=True):
            torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=tolerance)
        errors = (grad - true_grad).abs().amax(1) / true_grad.abs().amax(1)
        assert errors.max() <= (2 if self.d_entropy.any() else 1) * 1.5 * EPS / 2, errors


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0], ids=["flat", "usual", "peaked"])
def test_rows_of_any_sharpness(scale: float, entropy: bool) -> None:
    """Peaked: targets up to 160 nats below the maximum, which are computed again."""
    rows = Rows(scale)
    if not entropy:
        rows.d_entropy.zero_()
    rows.check(tolerance=1e-5 * max(scale, 1))


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_targets_that_are_almost_certain_keep_their_gradient(softcap: float | None) -> None:
    """1 - p is the mass of the other entries: no cancellation, whatever the rounding of z."""
    rows = Rows(4.0, softcap)
    rows.d_entropy.zero_()
    logits = reference.linear_logits(rows.hidden, rows.weight)
    rows.targets = logits.argmax(1)
    rows.bias = torch.zeros(V)
    rows.hidden = rows.hidden * torch.linspace(1, 6, M)[:, None].to(BFLOAT16)
    logps, grad = rows.ours()[0][0], rows.ours()[1]
    _, truth = rows.truth()
    assert logps.max() <= 0
    target, exact = (x.gather(1, rows.targets[:, None]) for x in (grad, truth))
    assert exact.abs().min() < (1e-7 if softcap is None else 0.01)
    torch.testing.assert_close(target, exact, rtol=0.006, atol=1e-14)  # the truth cancels there


def test_masked_vocabulary_and_targets() -> None:
    """-inf masks an entry, also the target's; a row of only -inf is nan, as is one with nan."""
    rows = Rows()
    rows.bias[40:] = -math.inf
    rows.targets %= 40
    rows.targets[0] = 50  # masked: its log-prob is -inf
    rows.d_logps[0] = 0
    rows.check()
    rows.bias.fill_(-math.inf)
    stats, _ = rows.ours()
    assert stats[0].isnan().all()
    assert stats[1].isnan().all()
    assert (stats[2] == -math.inf).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_nan(value: float) -> None:
    rows = Rows()
    rows.hidden[3, 2] = value
    rows.hidden[5, 2] = value
    rows.d_logps[5] = rows.d_entropy[5] = 0  # its gradient stays 0, as 0 times nan would not
    (logps, entropy, lse), grad = rows.ours()
    for value_of in (logps, entropy, lse):
        assert value_of[3].isnan()
        assert value_of[:3].isfinite().all()
    assert grad[3].isnan().all()
    assert (grad[5] == 0).all()
    assert grad[6:].isfinite().all()


def test_targets_outside_the_vocabulary_and_without_a_loss() -> None:
    """As a row kernel's: nan, and 0; nothing is read out of bounds."""
    rows = Rows()
    rows.targets[2], rows.targets[4], rows.targets[6] = V + 20, -7, -100
    (logps, entropy, lse), grad = rows.ours()
    assert logps[2].isnan()
    assert logps[4].isnan()
    assert entropy[2].isfinite()
    assert lse[4].isfinite()
    assert [x[6].item() for x in (logps, entropy, lse)] == [0.0, 0.0, 0.0]
    assert (grad[6] == 0).all()


def test_capture_multiplies_rows_without_a_loss_as_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = build(BY_NAME["packed"], BFLOAT16)
    clean, d_clean = run_linear(fused_linear_gac_loss, batch, backend="triton")
    dirty = batch.hidden.detach().clone()
    dirty[batch.targets == -100] = torch.nan
    batch.hidden = dirty.requires_grad_()
    monkeypatch.setattr("gac_kernels.tokens.capturing", lambda device: True)
    out, d_ours = run_linear(fused_linear_gac_loss, batch, backend="triton")
    torch.testing.assert_close(out.loss, clean.loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(d_ours, d_clean, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("chunk_bytes", [None, 20 * 4 * 37])
def test_a_gpu_computes_all_rows_of_a_small_batch(
    chunk_bytes: int | None, heads: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are slices of the hidden states: they are copied if bulk copies cannot read them."""

    def results(hidden: Tensor) -> list[Tensor]:
        leaves = hidden.detach().requires_grad_(), batch.weight
        settings = {"backend": "triton", "chunk_bytes": chunk_bytes, "wait": False}
        logps, entropy = linear_token_logprobs(*leaves, batch.targets, **settings)
        return [logps, entropy, *torch.autograd.grad((logps + 0.3 * entropy).sum(), leaves)]

    batch = build(BY_NAME["packed"], BFLOAT16)
    expected = results(batch.hidden)
    monkeypatch.setattr("gac_kernels.tokens.ASYNCHRONOUS", {"cpu"})
    monkeypatch.setattr("gac_kernels.loss.sort_tokens", None)
    shifted = torch.empty(batch.hidden.numel() + 1, dtype=BFLOAT16)[1:]
    for hidden in (batch.hidden, shifted.view_as(batch.hidden).copy_(batch.hidden)):
        torch.testing.assert_close(results(hidden), expected, rtol=0.01, atol=1e-3)
    assert len(heads) == 6


@pytest.mark.parametrize("rows", [3, 7, 100])
@pytest.mark.parametrize("name", ["packed", "k2", "entropy"])
def test_a_gpu_launches_the_first_gemm_before_it_reads_counts(
    name: str, rows: int, heads: list, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block may hold rows without a gradient and rows without a loss, of any values."""
    batch = build(BY_NAME[name], BFLOAT16)
    batch.advantages[0] = 0  # no gradient, unless of a KL or an entropy
    settings = {"backend": "triton", "chunk_bytes": chunk_bytes(BY_NAME[name].vocabulary, rows)}
    expected, d_expected = run_linear(fused_linear_gac_loss, batch, **settings)
    with torch.no_grad():
        batch.hidden[batch.targets == -100] = torch.nan
    for module in ("tokens", "linear", "loss"):
        monkeypatch.setattr(f"gac_kernels.{module}.ASYNCHRONOUS", {"cpu"})
    monkeypatch.setattr("gac_kernels.tokens.WORTH_SKIPPING", dict.fromkeys([BFLOAT16], 0))
    events, compute, tolist = [], exponentials.exponentials, Tensor.tolist

    def exponentials_of(**arguments: object) -> object:
        events.append("GEMM")
        return compute(**arguments)

    monkeypatch.setattr(exponentials, "exponentials", exponentials_of)

    def numbers(x: Tensor) -> list:
        events.extend(["counts"] * (x.shape == (2,)))
        return tolist(x)

    monkeypatch.setattr(Tensor, "tolist", numbers)
    ours, d_ours = run_linear(fused_linear_gac_loss, batch, **settings)
    monkeypatch.undo()
    assert events[:2] == ["GEMM", "counts"]
    torch.testing.assert_close(ours.logps, expected.logps, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_ours, d_expected, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(needs: tuple[bool, bool], heads: list) -> None:
    batch = build(BY_NAME["defaults"], BFLOAT16)
    batch.hidden.requires_grad_(needs[0])
    batch.weight.requires_grad_(needs[1])
    batch.bias.requires_grad_(False)
    out = batch.linear(backend="triton")
    assert len(heads) == 1
    assert (heads[0]._d_hidden is not None) == needs[0]
    assert (heads[0]._d_weight is not None) == needs[1]
    assert out.loss.requires_grad == any(needs)


def test_the_memory_has_no_logits(heads: list) -> None:
    """A chunk of 7B's head has 2816 rows in 1000 MiB, and no float32 block."""
    batch = build(BY_NAME["defaults"], BFLOAT16)
    batch.linear(backend="triton")
    assert heads[0].projection._logits.storage is None
    large = torch.empty(152064, 3584, dtype=BFLOAT16, device="meta")
    head = projection.Projection(large, None, BFLOAT16, 1000 << 20, stores_logits=False)
    assert head.block == head.chunk
    assert head.chunk % 256 == 0
    assert 0.9 * (1000 << 20) < head.chunk * 2 * (152064 + 4 * 3584) <= 1000 << 20


def loss_and_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, expected: Tensor, options: dict
) -> None:
    logps, *_ = linear_token_logprobs(hidden, weight, targets, **options)
    torch.testing.assert_close(logps, expected, rtol=1e-4, atol=1e-4)
    logps.sum().backward()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "it needs bfloat16, not torch.float32"),
        ({"softcap": 30.0}, "a softcap excludes gradients of entropies"),
        ({"backend": "native"}, "it needs the Triton backend"),
        ({"hidden_size": 20}, "rows of the weight must start at multiples of 16 bytes"),
        ({"transposed": True}, "rows of the weight must start at multiples of 16 bytes"),
        ({"outputs": ("is_top1",)}, "it computes no further outputs"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_it_does_not_cover_uses_logits_with_a_warning(
    change: dict, reason: str, heads: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gac_kernels import backends

    backends.warn_once.cache_clear()
    options = {"dtype": BFLOAT16, "hidden_size": H, "backend": "triton"} | change
    dtype, width = options.pop("dtype"), options.pop("hidden_size")
    emulate(monkeypatch, dtype)
    hidden = torch.randn(4, width).to(dtype).requires_grad_()
    weight, targets = torch.randn(V, width).to(dtype), torch.tensor([1, 2, 3, 4])
    if options.pop("transposed", False):
        weight = weight.T.contiguous().T
    softcap = change.get("softcap")
    (expected, _) = reference.linear_token_logprobs(hidden, weight, targets, softcap=softcap)
    with pytest.warns(RuntimeWarning, match=reason):
        loss_and_backward(hidden, weight, targets, expected, options)


def test_the_default_is_the_head_with_logits(heads: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAC_HEAD")
    build(BY_NAME["defaults"], BFLOAT16).linear(backend="triton")
    assert heads == []
    monkeypatch.setenv("GAC_HEAD", "fast")
    with pytest.raises(ValueError, match="GAC_HEAD=fast: use one of logits, epilogue"):
        build(BY_NAME["defaults"], BFLOAT16).linear(backend="triton")


def test_it_needs_a_gpu_of_compute_capability_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert epilogue.device_error(torch.device("cpu")) == "it needs an NVIDIA GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "9.0" in str(epilogue.device_error(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert epilogue.device_error(torch.device("cuda")) is None


def test_the_sum_of_columns_is_as_exact_as_float32() -> None:
    """A factor of three bfloat16 parts has 24 bits."""
    values = torch.rand(40, V).to(BFLOAT16)
    factors = torch.randn(40, 1)
    exact = (values.double() * factors.double()).sum(0)
    error = (epilogue.column_sums(values, factors).double() - exact).abs().max()
    assert error < 1e-5


def test_results_do_not_depend_on_other_rows() -> None:
    """Each row is summed in a fixed order, whatever block it is in."""
    rows = Rows()
    whole = rows.ours()
    part = Rows()
    part.hidden = torch.cat([rows.hidden[:10], rows.hidden[:11].flip(0)])
    part.targets = torch.cat([rows.targets[:10], rows.targets[:11].flip(0)])
    again = part.ours()
    for x, y in zip(whole[0], again[0], strict=True):
        assert torch.equal(x[:10], y[:10])
    assert torch.equal(whole[1][:10], again[1][:10])


def test_a_chunk_launches_six_small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its three GEMMs, two products with the factors, and copies."""
    from gac_kernels.backends.triton import launch

    names, run = [], launch.Launch.run

    def recorded(self: launch.Launch, device: torch.device) -> None:
        names.append(self.kernel.__name__)
        run(self, device)

    monkeypatch.setattr(launch.Launch, "run", recorded)
    batch = build(BY_NAME["defaults"], BFLOAT16)
    batch.linear(backend="triton", chunk_bytes=chunk_bytes(101, rows=100))
    assert names == [
        "reference_kernel",
        "exponentials_kernel",
        "sums_kernel",
        "guard_kernel",
        "terms_kernel",
        "finish_kernel",
    ]
