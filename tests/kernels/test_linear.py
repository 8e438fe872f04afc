"""The chunked LM head: values, gradients, FLOPs and memory."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gac_kernels import (
    DemoWeight,
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    projection,
    reference,
)
from gac_kernels.tokens import WORTH_SKIPPING
from tests.kernels.cases import (
    BY_NAME,
    LEAVES,
    Case,
    build,
    check_grads,
    check_outputs,
    each_backend,
    each_case,
    hidden_grad_by_rows,
    less_accurate,
    on_cuda,
    run_linear,
)


class WorkCounter(TorchDispatchMode):
    """Counts GEMMs and their FLOPs, and records the largest tensor that an operator allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms: Counter[str] = Counter()
        self.flops = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.gemms[name] += 1
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        # an allocation, neither a view nor an out= argument
        allocates = not any(result.alias_info for result in func._schema.returns)
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and allocates:
                self.largest = max(self.largest, x.numel())
        return out


def compare(case: Case, dtype: torch.dtype, backend: str) -> None:
    batch = build(case, dtype)
    truth, d_truth = run_linear(reference.fused_linear_gac_loss, batch.to(torch.float64))
    same_dtype, d_same_dtype = run_linear(reference.fused_linear_gac_loss, batch)
    if dtype == torch.float32:
        d_hidden, *others = d_same_dtype
        d_hidden = less_accurate(d_hidden, hidden_grad_by_rows(batch, 3), d_truth[0])
        d_same_dtype = (d_hidden, *others)
    # three rows per chunk, so that every case has several chunks and a partial last one
    chunk = 3 * 4 * case.vocabulary
    out, d_ours = run_linear(fused_linear_gac_loss, batch, backend=backend, chunk_bytes=chunk)
    # in base 2, log-probs near 0 have the rounding of the logits
    check_outputs(out, same_dtype, truth, floor=1.0 if on_cuda(backend) else 1e-3)
    check_grads(LEAVES, d_ours, d_same_dtype, d_truth, floor=0.1 if on_cuda(backend) else 1e-3)
    assert [g.dtype for g in d_ours] == [dtype] * 3


@pytest.mark.sampled
@each_backend
@each_case
def test_float32(case: Case, backend: str) -> None:
    compare(case, torch.float32, backend)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["token", "sequence"])  # in one pass, and in two
def test_half(level: str, dtype: torch.dtype, backend: str) -> None:
    spec = replace(BY_NAME["k2"].spec, importance_sampling_level=level)
    compare(replace(BY_NAME["k2"], spec=spec), dtype, backend)


def work_of(advantages, lengths=(8, 8, 8, 8), needs=(True, True), demos=(0, 0, 0, 0), **keywords):
    """Count the work of one forward and backward pass on [4, 8] tokens, H = 24, V = 101."""
    batch = build(Case("work", "", lengths=lengths, demos=demos))
    batch.hidden.requires_grad_(needs[0])
    batch.weight.requires_grad_(needs[1])
    with WorkCounter() as work:
        out = fused_linear_gac_loss(
            batch.hidden,
            batch.weight,
            batch.targets,
            torch.tensor(advantages),
            batch.is_demo,
            **{"mu": 0.5} | keywords,
        )
        if out.loss.requires_grad:
            out.loss.backward()
    return work, batch


NHV = 8 * 24 * 101  # for one row of the batch, whose GEMM takes 2 NHV FLOPs


@pytest.mark.parametrize(
    ("keywords", "units"),
    [
        ({"advantages": [1.0, 1, 1, 1]}, 4 * 6),
        ({"advantages": [1.0, 1, 0, 0]}, 2 * 6 + 2 * 2),
        ({"advantages": [0.0, 0, 0, 0]}, 4 * 2),
        ({"advantages": [0.0, 0, 0, 0], "spec": LossSpec(entropy_coef=0.1)}, 4 * 6),
        ({"advantages": [1.0, 1, 1, 1], "lengths": (8, 0, 8, 0)}, 2 * 6),
        ({"advantages": [1.0, 1, 1, 1], "demos": (0, 0, 0, 1), "mu": 0.0}, 3 * 6 + 2),
        ({"advantages": [1.0, 1, 1, 1], "demos": (0, 0, 0, 1), "mu": 1.0}, 6 + 3 * 2),
        (
            {
                "advantages": [0.0, 0, 0, 0],
                "demos": (1, 1, 1, 1),
                "spec": LossSpec(demo_weight=DemoWeight.SHAPED),
            },
            4 * 2,
        ),
        ({"advantages": [1.0, 1, 1, 1], "needs": (True, False)}, 4 * 4),
        ({"advantages": [1.0, 1, 1, 1], "needs": (False, True)}, 4 * 4),
        ({"advantages": [1.0, 1, 1, 1], "needs": (False, False)}, 4 * 2),
    ],
    ids=[
        "all-live",
        "half-zero-advantage",
        "zero-advantages",
        "entropy-needs-all-rows",
        "masked",
        "mu-0",
        "mu-1",
        "shaped-zero-advantage",
        "frozen-weight",
        "frozen-hidden",
        "no-gradient",
    ],
)
def test_flops(keywords: dict, units: int) -> None:
    """6 NHV FLOPs for rows with a gradient, 2 NHV for other live rows, 0 for masked rows."""
    work, _ = work_of(**keywords)
    assert work.flops == units * NHV


def test_work_that_is_not_needed_is_left_out() -> None:
    work, batch = work_of([1.0, 1, 1, 1], needs=(True, False), chunk_bytes=101 * 4)
    assert work.largest < batch.weight.numel()  # a frozen weight gets no buffer
    _, batch = work_of([0.0, 0, 0, 0])
    assert batch.hidden.grad.abs().sum() == 0
    assert batch.weight.grad.abs().sum() == 0
    with torch.no_grad():
        work, _ = work_of([1.0, 1, 1, 1])
    assert work.flops == 4 * 2 * NHV


@pytest.mark.parametrize("frozen", [False, True])
def test_logprobs_recompute_only_rows_with_an_upstream_gradient(frozen: bool) -> None:
    batch = build(Case("work", "", lengths=(8, 8, 8, 8), demos=(0, 0, 0, 0)))
    with WorkCounter() as work:
        logps = linear_token_logprobs(
            batch.hidden, batch.weight.requires_grad_(not frozen), batch.targets
        )[0]
        logps[:1].sum().backward()
    assert work.flops == (4 * 2 + 6 - 2 * frozen) * NHV


@pytest.mark.parametrize("call", ["loss", "logprobs"])
def test_memory_does_not_grow_with_tokens(call: str) -> None:
    """With 64 rows per chunk, no operator allocates more than [64, V], for N = 256 and 1024."""
    largest = []
    for tokens in (256, 1024):
        hidden = torch.randn(1, tokens, 2, requires_grad=True)
        weight = torch.randn(503, 2, requires_grad=True)
        targets = torch.randint(0, 503, (1, tokens))
        with WorkCounter() as work:
            if call == "loss":
                args = targets, torch.ones(1), torch.tensor([False])
                out = fused_linear_gac_loss(
                    hidden, weight, *args, chunk_bytes=64 * 503 * 4, mu=0.5
                ).loss
            else:
                out = linear_token_logprobs(hidden, weight, targets, chunk_bytes=64 * 503 * 4)[0]
            out.sum().backward()
        largest.append(work.largest)
    assert largest == [64 * 503, 64 * 503]


@each_backend
def test_masked_rows_are_never_read(
    backend: str, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes CUDA graph capture, which cannot read row counts and multiplies all rows."""
    batch = build(BY_NAME["packed"])
    clean, d_clean = run_linear(fused_linear_gac_loss, batch, backend=backend)
    dirty = batch.hidden.detach().clone()
    dirty[batch.targets == -100] = torch.nan
    batch.hidden = dirty.requires_grad_()
    out, d_ours = run_linear(fused_linear_gac_loss, batch, backend=backend)
    assert torch.equal(out.loss, clean.loss)
    assert all(torch.equal(a, b) for a, b in zip(d_ours, d_clean, strict=True))
    monkeypatch.setattr("gac_kernels.tokens.capturing", lambda device: True)
    out, d_ours = run_linear(fused_linear_gac_loss, batch, backend=backend)
    torch.testing.assert_close(out.loss, clean.loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(d_ours, d_clean, rtol=1e-4, atol=2e-6)
    # without a gradient, there is no buffer for it
    monkeypatch.setattr(projection.Projection, "gradient", None)
    with torch.no_grad():
        out = batch.linear(backend=backend)
    torch.testing.assert_close(out.loss, clean.loss, rtol=2e-6, atol=0)


@pytest.mark.parametrize("chunk_bytes", [None, 20 * 4 * 37])
@each_backend
def test_a_gpu_computes_all_rows_of_a_small_batch(
    backend: str, chunk_bytes: int | None, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is counted or moved; rows without a loss add nothing, even if they are nan."""
    keywords: dict[str, Any] = {"backend": backend, "chunk_bytes": chunk_bytes}

    def results(batch: Any) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        sequence = replace(batch.keywords["spec"], importance_sampling_level="sequence")
        for spec in (batch.keywords["spec"], sequence):
            out, grads = run_linear(fused_linear_gac_loss, batch, spec=spec, **keywords)
            values += [out.loss.detach(), out.logps, out.entropy, *grads]
        for wait in (True, False):
            stats = linear_token_logprobs(
                batch.hidden, batch.weight, batch.targets, wait=wait, **keywords
            )
            leaves = batch.hidden, batch.weight
            values += [*stats, *torch.autograd.grad(stats[0].sum(), leaves, retain_graph=True)]
            values += torch.autograd.grad(stats[1].sum(), leaves)
        return values

    batch = build(BY_NAME["packed"])
    expected = results(batch)
    dirty = batch.hidden.detach().clone()
    dirty[batch.targets == -100] = torch.nan
    batch.hidden = dirty.requires_grad_()
    for module in ("tokens", "loss"):
        monkeypatch.setattr(f"gac_kernels.{module}.ASYNCHRONOUS", {"cpu"})
    monkeypatch.setattr("gac_kernels.loss.sort_tokens", None)
    torch.testing.assert_close(results(batch), expected, rtol=1e-4, atol=2e-6)


def test_a_gpu_skips_rows_where_that_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gac_kernels.tokens.ASYNCHRONOUS", {"cpu"})
    at_stake = 4 * 4 * NHV  # FLOPs of both backward GEMMs
    for limit, done in ((at_stake - 1, 4 * 2 + 2 * 4), (at_stake, 4 * 6)):
        monkeypatch.setitem(WORTH_SKIPPING, torch.float32, limit)
        work, _ = work_of([1.0, 0, 0, 1])
        assert work.flops == done * NHV


def test_a_gpu_skips_rows_without_a_gradient_where_that_can_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one GEMM leaves rows out."""
    monkeypatch.setattr("gac_kernels.tokens.ASYNCHRONOUS", {"cpu"})
    batch = build(Case("work", "", lengths=(8, 2, 2, 0), demos=(0, 0, 0, 0)))
    at_stake = 4 * 2 * NHV
    for limit, tokens in ((at_stake - 1, 12), (at_stake, 32)):
        monkeypatch.setitem(WORTH_SKIPPING, torch.float32, limit)
        with torch.no_grad(), WorkCounter() as work:
            linear_token_logprobs(batch.hidden, batch.weight, batch.targets)
        assert work.flops == tokens * 2 * NHV // 8
        with torch.no_grad():
            work, _ = work_of([1.0] * 4, lengths=(8, 2, 2, 0))
        assert work.flops == tokens * 2 * NHV // 8


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_nan_hidden_gives_a_nan_loss(advantage: float) -> None:
    batch = build(BY_NAME["defaults"])
    with torch.no_grad():
        batch.hidden[0, 2, 3] = torch.nan
    batch.advantages[0] = advantage
    assert run_linear(fused_linear_gac_loss, batch)[0].loss.isnan()


def test_deterministic() -> None:
    batch = build(BY_NAME["wide"])
    (a, d_a), (b, d_b) = (
        run_linear(fused_linear_gac_loss, batch, chunk_bytes=80_000) for _ in range(2)
    )
    assert torch.equal(a.loss, b.loss)
    assert all(torch.equal(x, y) for x, y in zip(d_a, d_b, strict=True))


def test_the_next_gradient_reuses_only_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "KEPT_BYTES", 1)

    def gradient(name: str) -> torch.Tensor:
        return run_linear(fused_linear_gac_loss, build(BY_NAME[name]))[1][1]

    first = gradient("defaults")
    held, copy = first[-1], first.clone()
    second = gradient("defaults")
    assert second.data_ptr() != first.data_ptr()
    assert torch.equal(second, first)
    del first
    gradient("wide")  # another size
    assert torch.equal(held, copy[-1])
    assert torch.equal(second, copy)
    address, third = gradient("defaults").data_ptr(), gradient("defaults")
    assert third.data_ptr() == address
    assert torch.equal(third, copy)
    tied, tokens = torch.randn(7, 4, requires_grad=True), torch.tensor([[1, 2]])
    fused_linear_gac_loss(torch.nn.functional.embedding(tokens, tied), tied, tokens).loss.backward()
    ((memory, _),) = [x for (use, _), x in projection._kept.items() if use == "gradient"]
    assert tied.grad is not None
    assert tied.grad.data_ptr() == memory.data_ptr()


def test_the_gradient_of_given_logits_and_the_buffer_of_a_head_reuse_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One block each is kept, and none that is larger than a limit."""
    monkeypatch.setattr(projection, "KEPT_BYTES", 1)
    projection._kept.clear()
    batch = build(BY_NAME["defaults"])

    def given(**keywords: object) -> int:
        logits = batch.logits()
        (grad,) = torch.autograd.grad(
            fused_gac_loss(logits, *batch.inputs, mu=0.5, **keywords).loss, logits
        )
        return grad.data_ptr()

    assert given() == given()
    run_linear(fused_linear_gac_loss, batch)
    assert {use for use, _ in projection._kept} == {"gradient", "logits"}
    addresses = {use: x[0].data_ptr() for (use, _), x in projection._kept.items()}
    run_linear(fused_linear_gac_loss, batch)
    assert addresses == {use: x[0].data_ptr() for (use, _), x in projection._kept.items()}
    projection._kept.clear()
    monkeypatch.setattr(projection, "MOST_KEPT_BYTES", 1)
    given()
    assert projection._kept == {}


def test_half_weight_gradient_is_summed_in_float32() -> None:
    """Adding 4096 chunks of 2^-9 to 1 in bfloat16 would leave 1; the true sum is 9."""
    hidden = torch.ones(1, 4097, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    advantages = torch.full((1, 4097), -(2.0**-8))
    advantages[0, 0] = -2.0
    out = fused_linear_gac_loss(
        hidden,
        weight,
        torch.zeros(1, 4097, dtype=torch.int64),
        advantages,
        torch.tensor([False]),
        mu=0.0,
        rollout_norm=1.0,
        spec=LossSpec(rollout_reduction="token"),
        chunk_bytes=1,
    )
    out.loss.backward()
    assert weight.grad.tolist() == [[9.0], [-9.0]]


def test_autocast_rounds_the_operands_and_keeps_master_gradients() -> None:
    """Operands are as in F.linear, but a float32 weight's gradient is not rounded to bfloat16."""
    batch = build(BY_NAME["entropy"])
    with torch.autocast("cpu", torch.bfloat16):
        out, d_ours = run_linear(fused_linear_gac_loss, batch)
        logps, _ = linear_token_logprobs(batch.hidden, batch.weight, batch.targets)
    rounded = batch.to(torch.bfloat16).to(torch.float32)
    expected, d_expected = run_linear(fused_linear_gac_loss, rounded)
    assert torch.equal(out.loss, expected.loss)
    assert all(torch.equal(a, b) for a, b in zip(d_ours, d_expected, strict=True))
    weight_grad = d_ours[1]
    assert weight_grad.dtype == torch.float32
    assert not torch.equal(weight_grad, weight_grad.bfloat16().float())
    exact = linear_token_logprobs(rounded.hidden, rounded.weight, batch.targets)[0]
    assert torch.equal(logps, exact)
    (expected,) = torch.autograd.grad(exact.sum(), rounded.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.autograd.grad(logps.sum(), batch.weight)[0], expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    batch = build(BY_NAME["entropy"])

    def forward(hidden):
        return fused_linear_gac_loss(hidden, batch.weight, *batch.inputs, **batch.keywords).loss

    plain = torch.autograd.grad(forward(batch.hidden), (batch.hidden, batch.weight))
    checkpoint(forward, batch.hidden, use_reentrant=use_reentrant).backward()
    assert torch.equal(batch.hidden.grad, plain[0])
    assert torch.equal(batch.weight.grad, plain[1])


def test_inference_mode_and_the_tensors_that_pytree_finds() -> None:
    """FSDP's hooks search the output with pytree, which does not look inside dataclasses."""
    batch = build(BY_NAME["entropy"])
    plain = fused_linear_gac_loss(batch.hidden, batch.weight, *batch.inputs, **batch.keywords)
    with torch.inference_mode():
        out = fused_linear_gac_loss(batch.hidden, batch.weight, *batch.inputs, **batch.keywords)
        logps, _ = linear_token_logprobs(batch.hidden, batch.weight, batch.targets)
    assert any(leaf is plain.loss for leaf in torch.utils._pytree.tree_leaves(plain))
    assert torch.equal(out.loss, plain.loss)
    assert not out.loss.requires_grad
    assert torch.equal(logps, linear_token_logprobs(batch.hidden, batch.weight, batch.targets)[0])


def test_a_second_backward_raises_torchs_error() -> None:
    batch = build(BY_NAME["entropy"])
    loss = fused_linear_gac_loss(batch.hidden, batch.weight, *batch.inputs, mu=0.5).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="a second backward .* is not possible"):
        loss.backward()
    loss = fused_linear_gac_loss(batch.hidden, batch.weight, *batch.inputs, mu=0.5).loss
    (loss * 2).backward(retain_graph=True)  # scales the gradients in place
    with pytest.raises(RuntimeError, match="a second backward .* is not possible"):
        (loss * 2).backward()
