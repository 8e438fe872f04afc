"""Properties that hold for every batch; Hypothesis searches for counterexamples."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gac_kernels import LossOutput, LossSpec, TokenMoments, fused_gac_loss, fused_linear_gac_loss

V, H = 7, 5
small = settings(deadline=None, max_examples=25, derandomize=True)


@st.composite
def batches(draw: st.DrawFn) -> dict:
    """A random float64 batch with 1 to 5 sequences of 1 to 4 tokens, some masked."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = 2 * torch.randn(rows, width, V, generator=g, dtype=torch.float64)
    targets = torch.randint(0, V, (rows, width), generator=g)
    masked = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    targets[torch.tensor(masked).view(rows, width)] = -100
    past = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    noise = torch.randn(2, rows, width, generator=g, dtype=torch.float64) / 3
    reductions = st.sampled_from(["sequence", "token", "constant"])
    return {
        "logits": logits,
        "targets": targets,
        "advantages": torch.randn(rows, width, generator=g, dtype=torch.float64),
        "is_demo": torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows))),
        "old_logps": past + noise[0],
        "ref_logps": past + noise[1],
        "spec": LossSpec(
            kl_coef=0.1,
            entropy_coef=0.05,
            demo_weight=draw(st.sampled_from(["phi", "shaped"])),
            rollout_reduction=draw(reductions),
            demo_reduction=draw(reductions),
            max_tokens=6,
        ),
        "mu": draw(st.floats(0, 1)),
    }


ROWS = ("logits", "targets", "advantages", "is_demo", "old_logps", "ref_logps")


def evaluate(batch: dict, **keywords) -> tuple[LossOutput, Tensor]:
    logits = batch["logits"].detach().requires_grad_()
    out = fused_gac_loss(**(batch | {"logits": logits}), backend="reference", **keywords)
    return out, torch.autograd.grad(out.loss, logits)[0]


def close(ours: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def same_signals(ours: TokenMoments | None, other: TokenMoments | None) -> None:
    assert ours is not None and other is not None
    a, b = (torch.tensor(x.signals(0.2), dtype=torch.float64) for x in (ours, other))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


@small
@given(batches(), st.randoms(use_true_random=False))
def test_permuting_sequences_changes_nothing(batch: dict, random) -> None:
    order = list(range(len(batch["is_demo"])))
    random.shuffle(order)
    (out, grad), (moved, d_moved) = (
        evaluate(batch),
        evaluate(batch | {name: batch[name][order] for name in ROWS}),
    )
    close(moved.loss, out.loss)
    close(d_moved, grad[order])
    same_signals(moved.moments, out.moments)


@small
@given(batches(), st.integers(0, 5))
def test_splitting_a_batch_with_global_norms_adds_up(batch: dict, cut: int) -> None:
    """Gradient accumulation: micro-batches with the whole batch's norms sum to the whole."""
    spec, is_demo = batch["spec"], batch["is_demo"]
    lengths = (batch["targets"] != -100).sum(1)
    norms = {}
    for name, side in (("rollout", ~is_demo), ("demo", is_demo)):
        reduction = getattr(spec, f"{name}_reduction")
        count = {"sequence": lengths > 0, "token": lengths, "constant": lengths >= 0}[reduction]
        norms[f"{name}_norm"] = count[side].sum()
    whole, d_whole = evaluate(batch)
    parts = [
        evaluate(batch | {name: batch[name][rows] for name in ROWS}, **norms)
        for rows in (slice(None, cut), slice(cut, None))
    ]
    close(sum(out.loss for out, _ in parts), whole.loss)
    close(torch.cat([grad for _, grad in parts]), d_whole)
    same_signals(parts[0][0].moments + parts[1][0].moments, whole.moments)


@small
@given(batches(), st.integers(1, 3))
def test_masked_tokens_change_nothing(batch: dict, extra: int) -> None:
    longer = dict(batch)
    for name in ("logits", "advantages", "old_logps", "ref_logps"):
        shape = (len(batch["is_demo"]), extra, *batch[name].shape[2:])
        longer[name] = torch.cat([batch[name], torch.full(shape, torch.nan).double()], 1)
    longer["targets"] = torch.nn.functional.pad(batch["targets"], (0, extra), value=-100)
    (out, grad), (padded, d_padded) = evaluate(batch), evaluate(longer)
    close(padded.loss, out.loss)
    close(d_padded[:, :-extra], grad)
    assert (d_padded[:, -extra:] == 0).all()
    same_signals(padded.moments, out.moments)


@small
@given(batches(), st.floats(-50, 50))
def test_a_constant_added_to_the_logits_changes_nothing(batch: dict, shift: float) -> None:
    (out, grad), (moved, d_moved) = (
        evaluate(batch),
        evaluate(batch | {"logits": batch["logits"] + shift}),
    )
    close(moved.loss, out.loss)
    torch.testing.assert_close(d_moved, grad, rtol=1e-9, atol=1e-12)
    assert grad.sum(-1).abs().max() < 1e-12  # which is why every row's gradient sums to 0


@small
@given(batches())
def test_packed_equals_padded(batch: dict) -> None:
    lengths = torch.full((len(batch["is_demo"]),), batch["targets"].shape[1])
    flat = {name: batch[name].flatten(0, 1) for name in ROWS if name not in ("is_demo",)}
    flat["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    (out, grad), (packed, d_packed) = evaluate(batch), evaluate(batch | flat)
    close(packed.loss, out.loss)
    close(d_packed, grad.flatten(0, 1))
    close(packed.logps, out.logps.flatten())
    same_signals(packed.moments, out.moments)


@small
@given(batches(), st.integers(1, 2000))
def test_linear_equals_logits_for_any_chunk(batch: dict, chunk_bytes: int) -> None:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(*batch["targets"].shape, H, generator=g, dtype=torch.float64)
    weight = torch.randn(V, H, generator=g, dtype=torch.float64)
    hidden.requires_grad_(), weight.requires_grad_()
    arguments = {name: x for name, x in batch.items() if name != "logits"}
    out = fused_linear_gac_loss(hidden, weight, **arguments, chunk_bytes=chunk_bytes)
    plain = fused_gac_loss(hidden @ weight.T, **arguments, backend="reference")
    close(out.loss, plain.loss)
    grads = (torch.autograd.grad(x.loss, (hidden, weight)) for x in (out, plain))
    for ours, other in zip(*grads, strict=True):
        close(ours, other)
    same_signals(out.moments, plain.moments)


@small
@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_the_loss_is_linear_in_mu(batch: dict, a: float, b: float) -> None:
    (first, d_first), (second, d_second), (middle, d_middle) = (
        evaluate(batch | {"mu": mu}) for mu in (a, b, (a + b) / 2)
    )
    close(middle.loss, (first.loss + second.loss) / 2)
    close(d_middle, (d_first + d_second) / 2)
