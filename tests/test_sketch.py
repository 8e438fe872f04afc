"""The head sketch: exact projections of each sequence's gradient of the head, on every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gac_kernels import HeadSketch, fused_linear_gac_loss, reference
from gac_kernels.backends import reference as reference_backend
from gac_kernels.backends import triton
from gac_kernels.contract import LossSpec
from gac_kernels.inputs import BatchInputs
from gac_kernels.sketch import RowSketch, row_buckets
from gac_kernels.tokens import plan

from .cases import CASES, Batch, Case, build

SKETCH = HeadSketch(8, seed=3)
WIDE = Case("wide", "more than one tile of every backend", vocabulary=1531, old=0.3)


def call(batch: Batch, function=fused_linear_gac_loss, **keywords):
    return function(
        batch.hidden,
        batch.weight,
        batch.targets,
        batch.advantages,
        batch.is_demo,
        bias=batch.bias,
        **{**batch.keywords, **keywords},
    )


def norms(batch: Batch, spec: LossSpec) -> dict[str, float]:
    """The full batch's denominators, to be used for parts of it."""
    inputs = BatchInputs(
        batch.targets,
        batch.advantages,
        batch.is_demo,
        **{k: v for k, v in batch.keywords.items() if k != "spec"},
    )
    tokens = plan(inputs, spec, torch.float64)
    found = {}
    for side, reduction, name in (
        (~batch.is_demo, spec.rollout_reduction, "rollout_norm"),
        (batch.is_demo, spec.demo_reduction, "demo_norm"),
    ):
        lengths = tokens.lengths[side]
        counts = {"sequence": (lengths > 0).sum(), "token": lengths.sum(), "constant": len(lengths)}
        found[name] = float(counts[reduction])
    return found


def only(batch: Batch, sequence: int) -> Tensor:
    """The targets, with every other sequence masked."""
    cu_seqlens = batch.keywords.get("cu_seqlens")
    kept = torch.full_like(batch.targets, -100)
    part = sequence if cu_seqlens is None else slice(*cu_seqlens[sequence : sequence + 2].tolist())
    kept[part] = batch.targets[part]
    return kept


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_definition_projects_the_gradient_of_autograd(case):
    batch = build(case, torch.float64)
    found = call(batch, reference.fused_linear_gac_loss, sketch=SKETCH).sketch
    words = SKETCH.vocabulary(case.vocabulary).double()
    hidden = SKETCH.hidden(batch.hidden.shape[-1]).double()
    share = norms(batch, case.spec)
    for s, is_demo in enumerate(batch.is_demo.tolist()):
        part = Batch(
            batch.hidden,
            batch.weight,
            batch.bias,
            only(batch, s),
            batch.advantages,
            batch.is_demo,
            batch.keywords,
        )
        out = call(part, reference.fused_linear_gac_loss, mu=float(is_demo), **share)
        (grad,) = torch.autograd.grad(out.loss, batch.weight)
        expected = words @ grad @ hidden.T
        torch.testing.assert_close(found[s], expected, rtol=1e-6, atol=1e-7)


def check(case: Case, dtype: torch.dtype, backend: str, **keywords) -> None:
    """Assert that the error against float64 is at most twice that of the same-dtype reference."""
    batch = build(case, dtype)
    truth = call(batch.to(torch.float64), reference.fused_linear_gac_loss, sketch=SKETCH).sketch
    plain = call(batch, reference.fused_linear_gac_loss, sketch=SKETCH).sketch
    found = call(batch, backend=backend, sketch=SKETCH, **keywords).sketch
    assert found.dtype == torch.float32 and found.shape == (len(case.lengths), 8, 8)
    scale = truth.abs().max().clamp(min=1e-3)
    bound = 2 * (plain.double() - truth).abs().max() + 2e-6 * scale
    assert (found.double() - truth).abs().max() <= bound


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("case", [*CASES, WIDE], ids=lambda c: c.name)
def test_backends_agree_with_the_definition(case, backend):
    check(case, torch.float32, backend)
    check(case, torch.float32, backend, chunk_bytes=4 * case.vocabulary * 3)  # three rows a chunk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_half_precision(backend, dtype):
    check(CASES[0], dtype, backend)
    check(WIDE, dtype, backend)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [4, 16, 64])
def test_triton_sums_what_it_writes(size, narrow):
    """Sums are in float32 even if the gradient is stored in bfloat16."""
    torch.manual_seed(1)
    rows, vocabulary = 5, 1531
    logits = torch.randn(1, rows, vocabulary) * 2
    targets = torch.randint(vocabulary, (1, rows))
    targets[0, 2] = -100
    inputs = BatchInputs(targets, torch.tensor([1.0]), torch.tensor([False]), 0.3)
    tokens, spec = plan(inputs, LossSpec(entropy_coef=0.1)), LossSpec(entropy_coef=0.1)
    exact = torch.empty_like(logits)
    reference_rows = RowSketch(
        HeadSketch(size).signs(vocabulary, torch.device("cpu")), torch.zeros(rows, size)
    )
    reference_backend.row_loss(logits, tokens, spec, exact)
    row_buckets(exact, reference_rows)
    out = torch.empty_like(logits, dtype=torch.bfloat16 if narrow else None)
    signs = reference_rows.signs.to(torch.int8) if narrow else reference_rows.signs
    found = RowSketch(signs, torch.zeros(rows, size))
    triton.row_loss(logits, tokens, spec, out, found)
    torch.testing.assert_close(found.buckets, reference_rows.buckets, rtol=1e-5, atol=1e-7)
    assert found.buckets[2].abs().sum() == 0 and found.buckets[0].abs().sum() > 0


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_nothing_else_changes_and_results_repeat(backend):
    with_it, without = (build(WIDE), build(WIDE))
    first = call(with_it, backend=backend, sketch=SKETCH)
    plain = call(without, backend=backend)
    assert plain.sketch is None
    for name in ("loss", "rollout_loss", "demo_loss", "logps", "entropy"):
        assert torch.equal(getattr(first, name), getattr(plain, name))
    first.loss.backward()
    plain.loss.backward()
    assert torch.equal(with_it.weight.grad, without.weight.grad)
    assert torch.equal(with_it.hidden.grad, without.hidden.grad)
    assert torch.equal(first.sketch, call(build(WIDE), backend=backend, sketch=SKETCH).sketch)
    assert not first.sketch.requires_grad


@pytest.mark.parametrize("wants", ["nothing", "hidden", "weight", "bias"])
def test_frozen_inputs_are_sketched_all_the_same(wants):
    batch = build(WIDE)
    expected = call(batch, sketch=SKETCH).sketch
    for name in ("hidden", "weight", "bias"):
        getattr(batch, name).requires_grad_(name == wants)
    assert torch.equal(call(batch, sketch=SKETCH).sketch, expected)


@pytest.mark.parametrize("mu", [0.0, 1.0, torch.tensor(0.0), torch.tensor(1.0)])
def test_a_silent_side_is_unknown(mu):
    """Rows of a term with weight 0 are skipped, so their sketches are NaN; a sequence with zero
    gradient gives exactly 0.
    """
    batch = build(CASES[0])
    batch.advantages[3] = 0.0  # a rollout without a gradient
    known = call(batch, sketch=SKETCH, mu=0.5).sketch
    found = call(batch, sketch=SKETCH, mu=mu).sketch
    silent = batch.is_demo if float(mu) == 0 else ~batch.is_demo
    empty = torch.tensor(CASES[0].lengths) == 0
    empty[3] = True
    assert found[silent & ~empty].isnan().all()
    assert (found[empty] == 0).all() and (known[empty] == 0).all()
    torch.testing.assert_close(found[~silent], known[~silent], rtol=1e-5, atol=1e-7)


def test_weight_of_the_mixture_is_divided_out():
    a, b = (call(build(WIDE), sketch=SKETCH, mu=mu).sketch for mu in (0.2, 0.9))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_inner_products_are_right_on_average():
    batch = build(CASES[0])
    grads = []
    for s, is_demo in enumerate(batch.is_demo.tolist()):
        part = Batch(
            batch.hidden,
            batch.weight,
            batch.bias,
            only(batch, s),
            batch.advantages,
            batch.is_demo,
            batch.keywords,
        )
        out = call(part, mu=float(is_demo), **norms(batch, CASES[0].spec))
        grads.append(torch.autograd.grad(out.loss, batch.weight)[0].flatten())
    truth = torch.stack(grads) @ torch.stack(grads).T
    draws = torch.stack(
        [
            (s := call(batch, sketch=HeadSketch(16, seed)).sketch.flatten(1)) @ s.T
            for seed in range(400)
        ]
    )
    error = draws.mean(0) - truth
    assert (error.abs() <= 4.5 * draws.std(0) / 20 + 1e-9).all()  # 36 values, 4.5 sigma each
    # the predicted variance: (1/k + 1/k') |G_u|^2 |G_v|^2, up to a factor
    norm = truth.diagonal().sqrt()
    assert (draws.std(0) <= 1.5 * (2 / 16) ** 0.5 * norm[:, None] * norm + 1e-9).all()


def test_projections_are_signs():
    sketch = HeadSketch(16, seed=7)
    words, hidden = sketch.vocabulary(1000), sketch.hidden(64)
    assert words.shape == (16, 1000) and hidden.shape == (16, 64)
    assert (words.abs().sum(0) == 1).all() and (
        words.nonzero()[:, 0] == words.nonzero()[:, 1] % 16
    ).all()
    assert torch.equal(hidden.abs(), torch.full((16, 64), 0.25))
    assert abs(words.sum()) < 150 and abs(hidden.sum()) < 35  # about 4.5 sigma
    assert not torch.equal(words, HeadSketch(16, seed=8).vocabulary(1000))
    assert torch.equal(words, HeadSketch(16, seed=7).vocabulary(1000))


def test_under_compile():
    batch = build(CASES[0])
    compiled = torch.compile(lambda: call(batch, sketch=SKETCH).sketch, backend="aot_eager")
    assert torch.equal(compiled(), call(batch, sketch=SKETCH).sketch)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="size=12: use one of 4, 8, 16, 32, 64"):
        HeadSketch(12)
    with pytest.raises(TypeError, match="seed=0.5: use an integer"):
        HeadSketch(8, 0.5)
    with pytest.raises(TypeError, match="sketch=5: use a gac_kernels.HeadSketch"):
        call(build(CASES[0]), sketch=5)
