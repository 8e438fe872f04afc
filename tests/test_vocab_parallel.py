"""A vocabulary-parallel LM head gives the same results as an unsharded one."""

from __future__ import annotations

import pytest
import torch

from gac_kernels import DemoWeight, LossSpec, fused_linear_gac_loss
from gac_kernels.vocab_parallel import shard_bounds, vocab_parallel_gac_loss

from . import ranks

pytestmark = pytest.mark.dist
B, T, H, V = 6, 7, 16, 53  # neither 2 nor 3 divides V


def batch(dtype=torch.float32, bias=True):
    """Rollouts and demonstrations of unequal length, one of them empty."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731 - one expression
    targets = torch.randint(0, V, (B, T), generator=random)
    for b, length in enumerate((7, 3, 0, 5, 1, 7)):
        targets[b, length:] = -100
    return {
        "hidden": (draw(B, T, H) / 4).to(dtype),
        "weight": draw(V, H).to(dtype),
        "bias": draw(V).to(dtype) if bias else None,
        "targets": targets,
        "advantages": torch.tensor([1.0, -0.5, 1.0, 0.0, 1.0, 1.0]),
        "is_demo": torch.tensor([False, False, False, False, True, True]),
        "old_logps": -draw(B, T).abs() - 3,
        "ref_logps": -draw(B, T).abs() - 3,
    }


def gradients(loss, hidden, weight, bias, **rest):
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    out = loss(
        leaves[0],
        leaves[1],
        rest.pop("targets"),
        rest.pop("advantages"),
        rest.pop("is_demo"),
        bias=leaves[2] if bias is not None else None,
        **rest,
    )
    (2 * out.loss).backward()
    numbers = [getattr(out, n).detach() for n in out._fields if n not in ("moments", "sketch")]
    return numbers, out.moments.signals(), [x.grad for x in leaves]


def spread(data, settings):
    """Run the loss on this rank's shard of the head; return outputs, signals and gradients."""
    torch.distributed.init_process_group("gloo")
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    start, stop = shard_bounds(V, count, rank)
    own = {**data, "weight": data["weight"][start:stop]}
    own["bias"] = None if data["bias"] is None else data["bias"][start:stop]
    return gradients(vocab_parallel_gac_loss, **own, **settings)


def whole(data, **settings):
    """Results of the unsharded head in float64; in float32 it would be no more accurate than the
    sharded one.
    """
    exact = {
        k: x.double() if x is not None and x.is_floating_point() else x for k, x in data.items()
    }
    numbers, signals, grads = gradients(fused_linear_gac_loss, **exact, **settings)
    return [x.float() for x in numbers], signals, [g.float() for g in grads]


CASES = {
    "default": {},
    "everything": {"spec": LossSpec(kl_coef=0.2, entropy_coef=0.1, dual_clip=2.0, temperature=0.7)},
    "shaped": {"spec": LossSpec(demo_weight=DemoWeight.SHAPED), "mu": 0.9},
    "trust-tokens": {"spec": LossSpec(demo_weight=DemoWeight.TRUST, rollout_reduction="token")},
    "chunks-of-one-token": {"chunk_bytes": 1},
    "global-norms": {"rollout_norm": 9.0, "demo_norm": 40.0},
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_spread_head_equals_whole_head(count, case):
    data, settings = batch(), CASES[case]
    numbers, signals, (d_hidden, d_weight, d_bias) = whole(data, **settings)
    found = ranks.run(spread, data, settings, ranks=count)
    for rank in found:
        for x, y in zip(numbers, rank[0], strict=True):
            torch.testing.assert_close(y, x, rtol=1e-5, atol=2e-5)
        assert rank[1] == pytest.approx(signals, rel=1e-5)
        torch.testing.assert_close(rank[2][0], d_hidden, rtol=1e-5, atol=1e-6)
    parts = list(zip(*(rank[2][1:] for rank in found), strict=True))
    torch.testing.assert_close(torch.cat(parts[0]), d_weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(parts[1]), d_bias, rtol=1e-5, atol=1e-6)
    assert d_weight.abs().max() > 1e-3


def test_bfloat16_head():
    data = batch(torch.bfloat16, bias=False)
    numbers, _, (d_hidden, d_weight) = gradients(fused_linear_gac_loss, **data)
    found = ranks.run(spread, data, {}, ranks=2)
    torch.testing.assert_close(found[0][0][0], numbers[0], rtol=1e-5, atol=1e-6)
    # each rank rounds its part of the sum once
    torch.testing.assert_close(found[1][2][0], d_hidden, rtol=0.02, atol=1e-3)
    both = torch.cat([rank[2][1] for rank in found])
    assert both.dtype == torch.bfloat16
    torch.testing.assert_close(both, d_weight, rtol=0.01, atol=1e-4)


def test_masked_words_and_broken_rows():
    """A bias of -inf masks vocabulary entries; an infinite hidden state must give a NaN loss."""
    data = batch()
    data["bias"][
        V - 20 :
    ] = -torch.inf  # all of one rank's vocabulary entries and some of its neighbor's
    data["targets"].clamp_(max=V - 21)
    numbers, _, grads = whole(data)
    for rank in ranks.run(spread, data, {}, ranks=3):
        torch.testing.assert_close(rank[0][0], numbers[0], rtol=2e-6, atol=2e-6)
        assert all(g.isfinite().all() for g in rank[2])
        torch.testing.assert_close(rank[2][0], grads[0], rtol=1e-5, atol=1e-6)
    data["hidden"][0, 0, 0] = torch.inf
    for rank in ranks.run(spread, data, {}, ranks=2):
        assert rank[0][0].isnan()


def test_a_target_of_no_rank_is_refused():
    data = batch()
    data["targets"][0, 0] = V
    for message in ranks.errors(spread, data, {}, ranks=2):
        assert f"targets[0, 0] = {V}: use a token in" in message


def test_every_word_has_one_owner():
    for count in (1, 2, 3, 7):
        bounds = [shard_bounds(V, count, rank) for rank in range(count)]
        words = [w for start, stop in bounds for w in range(start, stop)]
        assert words == list(range(V))
