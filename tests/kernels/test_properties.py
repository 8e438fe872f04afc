"""Properties that hold for every batch; Hypothesis searches for counterexamples."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gac_kernels import LossOutput, LossSpec, TokenMoments, fused_gac_loss, fused_linear_gac_loss
from gac_kernels.contract import CHOICES, REDUCTIONS

V, H = 7, 5
fast_settings = settings(deadline=None, max_examples=25, derandomize=True)


@st.composite
def batches(draw: st.DrawFn) -> dict:
    """A random float64 batch with 1 to 5 sequences of 1 to 4 tokens, some masked."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = 2 * torch.randn(rows, width, V, generator=g, dtype=torch.float64)
    targets = torch.randint(0, V, (rows, width), generator=g)
    masked = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    targets[torch.tensor(masked).view(rows, width)] = -100
    logps = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    noise = torch.randn(3, rows, width, generator=g, dtype=torch.float64) / 3
    reductions = st.sampled_from(REDUCTIONS)
    correction, size = (
        draw(st.sampled_from(CHOICES["correction"])),
        draw(st.sampled_from([rows, rows * width])),
    )
    is_demo = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    return {
        "logits": logits,
        "targets": targets,
        "advantages": torch.randn(rows, width, generator=g, dtype=torch.float64),
        "is_demo": is_demo if size == rows else is_demo.view(rows, width),
        "old_logps": logps + noise[0] if draw(st.booleans()) else None,
        "ref_logps": logps + noise[1],
        "rollout_logps": None if correction == "none" else logps + noise[2],
        "weights": torch.rand(rows, width, generator=g, dtype=torch.float64),
        "spec": LossSpec(
            policy_loss=draw(st.sampled_from(CHOICES["policy_loss"])),
            importance_sampling_level=draw(st.sampled_from(CHOICES["importance_sampling_level"])),
            correction=correction,
            use_bias_correction_kl=draw(st.booleans()),
            kl_coef=0.1,
            entropy_coef=0.05,
            demo_weight=draw(st.sampled_from(["phi", "shaped"])),
            rollout_reduction=draw(reductions),
            demo_reduction=draw(reductions),
            max_tokens=6,
        ),
        "mu": draw(st.floats(0, 1)),
    }


COLUMNS = ("advantages", "old_logps", "ref_logps", "rollout_logps", "weights")
ROWS = ("logits", "targets", "is_demo", *COLUMNS)


def rows_of(batch: dict, rows: slice | list[int]) -> dict:
    """The batch with only these rows."""
    return batch | {name: batch[name][rows] for name in ROWS if batch[name] is not None}


def evaluate(batch: dict, **keywords) -> tuple[LossOutput, Tensor]:
    logits = batch["logits"].detach().requires_grad_()
    out = fused_gac_loss(**(batch | {"logits": logits}), backend="reference", **keywords)
    return out, torch.autograd.grad(out.loss, logits)[0]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def assert_same_signals(actual: TokenMoments | None, expected: TokenMoments | None) -> None:
    assert actual is not None
    assert expected is not None
    signals = (torch.tensor(x.signals(0.2), dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(*signals, rtol=1e-6, atol=1e-9, equal_nan=True)


@fast_settings
@given(batches(), st.randoms(use_true_random=False))
def test_permuting_sequences_changes_nothing(batch: dict, random) -> None:
    order = list(range(len(batch["is_demo"])))
    random.shuffle(order)
    out, grad = evaluate(batch)
    permuted, d_permuted = evaluate(rows_of(batch, order))
    assert_close(permuted.loss, out.loss)
    assert_close(d_permuted, grad[order])
    assert_same_signals(permuted.moments, out.moments)


@fast_settings
@given(batches(), st.integers(0, 5))
def test_micro_batches_with_global_norms_add_up(batch: dict, split: int) -> None:
    """Gradient accumulation over micro-batches gives the loss and gradient of the full batch."""
    spec, live = batch["spec"], batch["targets"] != -100
    is_demo = batch["is_demo"].view(len(live), -1).expand_as(live)
    norms = {}
    for name, role in (("rollout", ~is_demo), ("demo", is_demo)):
        lengths = (live & role).sum(1)
        # a sequence without a loss has the role of its first position
        present = (lengths > 0) | (~live.any(1) & role[:, 0])
        count = {"sequence": lengths > 0, "token": lengths}
        norms[f"{name}_norm"] = count.get(getattr(spec, f"{name}_reduction"), present).sum()
    full, d_full = evaluate(batch)
    parts = [
        evaluate(rows_of(batch, rows), **norms) for rows in (slice(None, split), slice(split, None))
    ]
    assert_close(sum(out.loss for out, _ in parts), full.loss)
    assert_close(torch.cat([grad for _, grad in parts]), d_full)
    assert_same_signals(parts[0][0].moments + parts[1][0].moments, full.moments)


@fast_settings
@given(batches(), st.integers(1, 3))
def test_masked_tokens_change_nothing(batch: dict, extra: int) -> None:
    longer = dict(batch)
    for name in ("logits", *COLUMNS):
        if batch[name] is not None:
            shape = (len(batch["is_demo"]), extra, *batch[name].shape[2:])
            value = 1.0 if name == "weights" else torch.nan
            longer[name] = torch.cat([batch[name], torch.full(shape, value).double()], 1)
    if batch["is_demo"].dim() == 2:
        longer["is_demo"] = torch.nn.functional.pad(batch["is_demo"], (0, extra))
    longer["targets"] = torch.nn.functional.pad(batch["targets"], (0, extra), value=-100)
    (out, grad), (padded, d_padded) = evaluate(batch), evaluate(longer)
    assert_close(padded.loss, out.loss)
    assert_close(d_padded[:, :-extra], grad)
    assert (d_padded[:, -extra:] == 0).all()
    assert_same_signals(padded.moments, out.moments)


@fast_settings
@given(batches(), st.floats(-50, 50))
def test_a_constant_added_to_the_logits_changes_nothing(batch: dict, shift: float) -> None:
    out, grad = evaluate(batch)
    shifted, d_shifted = evaluate(batch | {"logits": batch["logits"] + shift})
    assert_close(shifted.loss, out.loss)
    assert_close(d_shifted, grad)
    assert grad.sum(-1).abs().max() < 1e-12  # therefore every row's gradient sums to 0


@fast_settings
@given(batches())
def test_packed_equals_padded(batch: dict) -> None:
    lengths = torch.full((len(batch["is_demo"]),), batch["targets"].shape[1])
    per_token = [k for k in ROWS if batch[k] is not None and batch[k].dim() > 1]
    flat = {name: batch[name].flatten(0, 1) for name in per_token}
    flat["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    (out, grad), (packed, d_packed) = evaluate(batch), evaluate(batch | flat)
    assert_close(packed.loss, out.loss)
    assert_close(d_packed, grad.flatten(0, 1))
    assert_close(packed.logps, out.logps.flatten())
    assert_same_signals(packed.moments, out.moments)


@fast_settings
@given(batches(), st.integers(1, 2000))
def test_linear_equals_logits_for_any_chunk(batch: dict, chunk_bytes: int) -> None:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(*batch["targets"].shape, H, generator=g, dtype=torch.float64)
    weight = torch.randn(V, H, generator=g, dtype=torch.float64)
    hidden.requires_grad_(), weight.requires_grad_()
    arguments = {name: x for name, x in batch.items() if name != "logits"}
    out = fused_linear_gac_loss(hidden, weight, **arguments, chunk_bytes=chunk_bytes)
    expected = fused_gac_loss(hidden @ weight.T, **arguments, backend="reference")
    assert_close(out.loss, expected.loss)
    grads = (torch.autograd.grad(x.loss, (hidden, weight)) for x in (out, expected))
    for actual_grad, expected_grad in zip(*grads, strict=True):
        assert_close(actual_grad, expected_grad)
    assert_same_signals(out.moments, expected.moments)


@fast_settings
@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_the_loss_is_linear_in_mu(batch: dict, a: float, b: float) -> None:
    (first, d_first), (second, d_second), (middle, d_middle) = (
        evaluate(batch | {"mu": mu}) for mu in (a, b, (a + b) / 2)
    )
    assert_close(middle.loss, (first.loss + second.loss) / 2)
    assert_close(d_middle, (d_first + d_second) / 2)
