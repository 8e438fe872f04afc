"""The head sketch: projections of each sequence's gradient of the head, on every backend."""

from dataclasses import replace

import pytest
import torch

from gac_kernels import HeadSketch, fused_linear_gac_loss, reference
from gac_kernels.backends import triton
from gac_kernels.contract import LossSpec
from gac_kernels.sketch import RowSketch, row_buckets
from gac_kernels.tokens import BatchInputs, plan
from tests.kernels.cases import (
    CASES,
    Batch,
    Case,
    build,
    each_backend,
    each_case,
    on_cuda,
)

SKETCH = HeadSketch(8, seed=3)
WIDE = Case("wide", "more than one tile of every backend", vocabulary=1531, old=0.3)


def norms(batch: Batch, spec: LossSpec) -> dict[str, float]:
    """Compute the full batch's denominators, for the loss of a part of it."""
    keywords = {k: v for k, v in batch.keywords.items() if k in BatchInputs._fields}
    tokens = plan(BatchInputs(*batch.inputs, **keywords), spec, torch.float64)
    denominators = {}
    for in_term, reduction, name in (
        (~batch.is_demo, spec.rollout_reduction, "rollout_norm"),
        (batch.is_demo, spec.demo_reduction, "demo_norm"),
    ):
        lengths = tokens.lengths[in_term]
        counts = {"sequence": (lengths > 0).sum(), "token": lengths.sum(), "constant": len(lengths)}
        denominators[name] = float(counts[reduction])
    return denominators


def only_sequence(batch: Batch, sequence: int) -> Batch:
    """Mask the targets of all other sequences."""
    cu_seqlens = batch.keywords.get("cu_seqlens")
    targets = torch.full_like(batch.targets, -100)
    rows = sequence if cu_seqlens is None else slice(*cu_seqlens[sequence : sequence + 2].tolist())
    targets[rows] = batch.targets[rows]
    return replace(batch, targets=targets)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_sketch_projects_the_autograd_gradient(case):
    batch = build(case, torch.float64)
    sketches = batch.linear(reference.fused_linear_gac_loss, sketch=SKETCH).sketch
    vocab_projection = SKETCH.vocabulary(case.vocabulary).double()
    hidden_projection = SKETCH.hidden(batch.hidden.shape[-1]).double()
    denominators = norms(batch, case.spec)
    for s, is_demo in enumerate(batch.is_demo.tolist()):
        part = only_sequence(batch, s)
        out = part.linear(reference.fused_linear_gac_loss, mu=float(is_demo), **denominators)
        (grad,) = torch.autograd.grad(out.loss, batch.weight)
        torch.testing.assert_close(
            sketches[s], vocab_projection @ grad @ hidden_projection.T, rtol=1e-6, atol=1e-7
        )


def check(case: Case, dtype: torch.dtype, backend: str, **keywords) -> None:
    """Assert that the error against float64 is at most twice that of the same-dtype reference."""
    batch = build(case, dtype)
    truth = batch.to(torch.float64).linear(reference.fused_linear_gac_loss, sketch=SKETCH).sketch
    same_dtype = batch.linear(reference.fused_linear_gac_loss, sketch=SKETCH).sketch
    ours = batch.linear(backend=backend, sketch=SKETCH, **keywords).sketch
    assert ours.dtype == torch.float32
    assert ours.shape == (len(case.lengths), 8, 8)
    scale = truth.abs().max().clamp(min=0.1 if on_cuda(backend) else 1e-3)
    bound = 2 * (same_dtype.double() - truth).abs().max() + 2e-6 * scale
    assert (ours.double() - truth).abs().max() <= bound


@pytest.mark.sampled
@each_backend
@each_case
def test_backends_agree_with_the_definition(case, backend):
    check(case, torch.float32, backend)
    check(case, torch.float32, backend, chunk_bytes=4 * case.vocabulary * 3)  # 3 rows per chunk


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_backend
def test_half_precision(backend, dtype):
    check(CASES[0], dtype, backend)
    check(WIDE, dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [4, 16, 64])
def test_triton_sketch_matches_the_written_gradient(size, dtype):
    """Sums are in float32 even if the gradient is stored in bfloat16."""
    torch.manual_seed(1)
    rows, vocabulary = 5, 1531
    logits = torch.randn(1, rows, vocabulary) * 2
    targets = torch.randint(vocabulary, (1, rows))
    targets[0, 2] = -100
    inputs = BatchInputs(targets, torch.tensor([1.0]), torch.tensor([False]), 0.3)
    spec = LossSpec(entropy_coef=0.1)
    tokens = plan(inputs, spec)
    signs = HeadSketch(size).signs(vocabulary, torch.device("cpu"))
    grad, expected = torch.empty_like(logits), RowSketch(signs, torch.zeros(rows, size))
    reference.row_loss(logits, tokens, spec, grad)
    row_buckets(grad, expected)
    signs = signs if dtype == torch.float32 else signs.to(torch.int8)
    out, ours = torch.empty_like(logits, dtype=dtype), RowSketch(signs, torch.zeros(rows, size))
    triton.row_loss(logits, tokens, spec, out, ours)
    torch.testing.assert_close(ours.buckets, expected.buckets, rtol=1e-5, atol=1e-7)
    assert ours.buckets[2].abs().sum() == 0
    assert ours.buckets[0].abs().sum() > 0


@each_backend
def test_sketch_changes_no_other_output_and_is_deterministic(backend):
    sketched_batch, plain_batch = build(WIDE), build(WIDE)
    sketched = sketched_batch.linear(backend=backend, sketch=SKETCH)
    plain = plain_batch.linear(backend=backend)
    assert plain.sketch is None
    for name in ("loss", "rollout_loss", "demo_loss", "logps", "entropy"):
        assert torch.equal(getattr(sketched, name), getattr(plain, name))
    sketched.loss.backward()
    plain.loss.backward()
    assert torch.equal(sketched_batch.weight.grad, plain_batch.weight.grad)
    assert torch.equal(sketched_batch.hidden.grad, plain_batch.hidden.grad)
    assert torch.equal(sketched.sketch, build(WIDE).linear(backend=backend, sketch=SKETCH).sketch)
    assert not sketched.sketch.requires_grad


@pytest.mark.parametrize("trainable", ["nothing", "hidden", "weight", "bias"])
def test_frozen_inputs_do_not_change_the_sketch(trainable):
    batch = build(WIDE)
    expected = batch.linear(sketch=SKETCH).sketch
    for name in ("hidden", "weight", "bias"):
        getattr(batch, name).requires_grad_(name == trainable)
    assert torch.equal(batch.linear(sketch=SKETCH).sketch, expected)


@pytest.mark.parametrize("mu", [0.0, 1.0, torch.tensor(0.0), torch.tensor(1.0)])
def test_sketches_do_not_depend_on_mu_and_are_nan_for_rows_with_zero_weight(mu):
    """Rows with zero weight are skipped; a sequence with gradient 0 has a sketch of exactly 0."""
    batch = build(CASES[0])
    batch.advantages[3] = 0.0  # a rollout without a gradient
    expected = batch.linear(sketch=SKETCH, mu=0.5).sketch
    sketches = batch.linear(sketch=SKETCH, mu=mu).sketch
    zero_weight = batch.is_demo if float(mu) == 0 else ~batch.is_demo
    zero_gradient = torch.tensor(CASES[0].lengths) == 0
    zero_gradient[3] = True
    assert sketches[zero_weight & ~zero_gradient].isnan().all()
    assert (sketches[zero_gradient] == 0).all()
    assert (expected[zero_gradient] == 0).all()
    torch.testing.assert_close(sketches[~zero_weight], expected[~zero_weight], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("function", [reference.fused_linear_gac_loss, fused_linear_gac_loss])
def test_masked_hidden_states_are_not_sketched(function):
    batch = build(CASES[0])
    expected = batch.linear(function, sketch=SKETCH).sketch
    batch.hidden.data[batch.targets == -100] = torch.nan
    assert torch.equal(batch.linear(function, sketch=SKETCH).sketch, expected)


def test_sketch_does_not_depend_on_the_block_size(monkeypatch):
    expected = build(WIDE).linear(sketch=SKETCH).sketch
    monkeypatch.setattr("gac_kernels.sketch.BLOCK", 3)  # sequences of four positions
    torch.testing.assert_close(build(WIDE).linear(sketch=SKETCH).sketch, expected)


@pytest.mark.parametrize("mu", [0.0, 0.4, 1.0])
def test_roles_per_token_give_the_same_sketches(mu):
    batch = build(CASES[0])
    expected = batch.linear(sketch=SKETCH, mu=mu).sketch
    batch.is_demo = batch.is_demo[:, None].expand_as(batch.targets)
    torch.testing.assert_close(
        batch.linear(sketch=SKETCH, mu=mu).sketch, expected, rtol=1e-5, atol=1e-7, equal_nan=True
    )


def test_inner_products_are_unbiased():
    batch = build(CASES[0])
    grads = []
    for s, is_demo in enumerate(batch.is_demo.tolist()):
        out = only_sequence(batch, s).linear(mu=float(is_demo), **norms(batch, CASES[0].spec))
        grads.append(torch.autograd.grad(out.loss, batch.weight)[0].flatten())
    truth = torch.stack(grads) @ torch.stack(grads).T
    sketches = [batch.linear(sketch=HeadSketch(16, seed)).sketch.flatten(1) for seed in range(400)]
    products = torch.stack([sketch @ sketch.T for sketch in sketches])
    error = products.mean(0) - truth
    assert (error.abs() <= 4.5 * products.std(0) / 20 + 1e-9).all()  # 4.5 sigma for each entry
    # the predicted variance is (1/k + 1/k') |G_u|^2 |G_v|^2, up to a factor
    norm = truth.diagonal().sqrt()
    assert (products.std(0) <= 1.5 * (2 / 16) ** 0.5 * norm[:, None] * norm + 1e-9).all()


def test_projections_are_signs():
    sketch = HeadSketch(16, seed=7)
    vocab, hidden = sketch.vocabulary(1000), sketch.hidden(64)
    assert vocab.shape == (16, 1000)
    assert hidden.shape == (16, 64)
    bucket, entry = vocab.nonzero().T
    assert (vocab.abs().sum(0) == 1).all()
    assert (bucket == entry % 16).all()
    assert torch.equal(hidden.abs(), torch.full((16, 64), 0.25))
    assert abs(vocab.sum()) < 150
    assert abs(hidden.sum()) < 35
    assert not torch.equal(vocab, HeadSketch(16, seed=8).vocabulary(1000))
    assert torch.equal(vocab, HeadSketch(16, seed=7).vocabulary(1000))
    own = sketch.signs(16 * 64, torch.device("cpu")) == 4 * hidden.flatten()
    assert 0.3 < own.float().mean() < 0.7  # each projection has its own signs


def test_torch_compile():
    batch = build(CASES[0])
    torch.compiler.reset()
    compiled = torch.compile(
        lambda: batch.linear(sketch=SKETCH).sketch, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(), batch.linear(sketch=SKETCH).sketch)


def test_invalid_arguments_are_rejected():
    for error, arguments, message in (
        (ValueError, (12,), "size=12: use one of 4, 8, 16, 32, 64"),
        (ValueError, (16.0,), "size=16.0: use one of 4, 8"),
        (TypeError, (8, 0.5), "seed=0.5: use an integer"),
        (TypeError, (8, True), "seed=True: use an integer"),
    ):
        with pytest.raises(error, match=message):
            HeadSketch(*arguments)
    with pytest.raises(TypeError, match="sketch=5: use a gac_kernels.HeadSketch"):
        build(CASES[0]).linear(sketch=5)


def test_signs_come_from_the_published_hash() -> None:
    """Stored sketches stay comparable: values of lowbias32 in plain integers."""

    def lowbias32(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return x ^ x >> 16

    key = lowbias32(2 * 7)  # 2 seed + stream
    expected = [1.0 - 2 * (lowbias32(i ^ key) >> 31) for i in range(200)]
    assert HeadSketch(4, 7).signs(200, torch.device("cpu")).tolist() == expected
