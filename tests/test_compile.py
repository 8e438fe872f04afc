"""torch.compile: the public functions are custom operators and cause no graph breaks."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gac_kernels import (
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    ops,
    token_logprobs,
)

from .cases import BY_NAME, Batch, build


def all_calls(batch: Batch, mu: float | torch.Tensor):
    """Call every public function; the first result depends on all differentiable outputs."""
    hidden, weight, bias = batch.hidden, batch.weight, batch.bias
    logits = torch.nn.functional.linear(hidden, weight, bias)
    keywords = batch.keywords | {"mu": mu}
    args = batch.targets, batch.advantages, batch.is_demo
    out = fused_linear_gac_loss(hidden * 2, weight, *args, bias=bias, **keywords)
    plain = fused_gac_loss(logits, *args, moments=False, **keywords)
    logps, entropy = linear_token_logprobs(hidden, weight, batch.targets, bias=bias)
    logps2, entropy2 = token_logprobs(logits, batch.targets, temperature=0.7)
    extra = (logps * entropy).sum() + (logps2 - entropy2).sum()
    return out.loss * 3 + plain.loss + extra * 0.1, out, plain


def check_compiled(backend: str, name: str, mu: float | torch.Tensor, autocast: bool) -> None:
    batch = build(BY_NAME[name])
    leaves = batch.hidden, batch.weight, batch.bias
    torch.compiler.reset()
    compiled = torch.compile(all_calls, fullgraph=True, backend=backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total, out, plain = all_calls(batch, mu)
        total_c, out_c, plain_c = compiled(batch, mu)
    # compiled code runs the same operators; inductor may only reorder the additions around them
    torch.testing.assert_close(total_c, total, rtol=1e-6, atol=0)
    grads, grads_c = torch.autograd.grad(total, leaves), torch.autograd.grad(total_c, leaves)
    torch.testing.assert_close(grads_c, grads, rtol=1e-5, atol=1e-6)
    assert torch.equal(out_c.logps, out.logps) and torch.equal(out_c.entropy, out.entropy)
    assert out_c.moments.signals() == out.moments.signals()
    assert plain_c.moments is None and not out_c.demo_loss.requires_grad
    assert torch.equal(plain_c.rollout_loss, plain.rollout_loss)


@pytest.mark.parametrize("name", ["entropy", "k3"])
def test_one_graph_with_the_same_values(name: str) -> None:
    check_compiled("aot_eager", name, 0.3, autocast=False)


def test_mu_as_a_tensor() -> None:
    check_compiled("aot_eager", "clip", torch.tensor(0.3), autocast=False)


def test_autocast_dtype_reaches_the_operator() -> None:
    check_compiled("aot_eager", "defaults", 0.3, autocast=True)


@pytest.mark.slow
def test_inductor() -> None:
    check_compiled("inductor", "entropy", 0.3, autocast=False)


def test_a_new_mu_does_not_recompile() -> None:
    """The controller changes mu at every step; as a tensor, it is not a constant of the graph."""
    batch = build(BY_NAME["defaults"])
    counter = CompileCounterWithBackend("eager")
    torch.compiler.reset()
    compiled = torch.compile(all_calls, fullgraph=True, backend=counter)
    for step in range(3):
        mu = torch.tensor(0.3 + 0.01 * step)
        torch.testing.assert_close(compiled(batch, mu)[0], all_calls(batch, mu)[0])
    assert counter.frame_count == 1


def test_no_grad_and_frozen_weight() -> None:
    batch = build(BY_NAME["defaults"])
    torch.compiler.reset()
    compiled = torch.compile(all_calls, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(batch, 0.3)[1].loss, all_calls(batch, 0.3)[1].loss)
    batch.weight.requires_grad_(False)
    (grad,) = torch.autograd.grad(compiled(batch, 0.3)[0], batch.hidden)
    (expected,) = torch.autograd.grad(all_calls(batch, 0.3)[0], batch.hidden)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def test_values_are_checked_at_run_time() -> None:
    batch = build(BY_NAME["defaults"])
    torch.compiler.reset()
    compiled = torch.compile(fused_gac_loss, fullgraph=True, backend="aot_eager")
    logits = batch.logits()
    compiled(logits, batch.targets, batch.advantages, batch.is_demo)
    batch.targets[0, 0] = 101
    with pytest.raises(ValueError, match=r"targets\[0, 0\] = 101"):
        compiled(logits, batch.targets, batch.advantages, batch.is_demo)


def test_float16_weight_gradient() -> None:
    """The custom operator returns `inv_scale`, which unscales float16 gradients."""
    batch = build(BY_NAME["one"], torch.float16)

    def call(batch: Batch):
        args = batch.targets, batch.advantages, batch.is_demo
        return fused_linear_gac_loss(batch.hidden, batch.weight, *args, **batch.keywords).loss

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = batch.hidden, batch.weight
    grads = torch.autograd.grad(compiled(batch), leaves)
    expected = torch.autograd.grad(call(batch), leaves)
    assert [g.dtype for g in grads] == [torch.float16] * 2
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("form", ["logits", "linear"])
def test_opcheck(form: str) -> None:
    batch = build(BY_NAME["k3"])
    linear = form == "linear"
    rows = batch.hidden if linear else batch.logits()
    head = (batch.weight, batch.bias) if linear else (None, None)
    keywords, needs = batch.keywords, [True, linear, linear]
    torch.library.opcheck(
        torch.ops.gac_kernels.loss.default,
        (
            rows,
            *head,
            batch.targets,
            batch.advantages,
            batch.is_demo,
            torch.tensor(0.3),
            keywords["old_logps"],
            keywords["ref_logps"],
            keywords["cu_seqlens"],
            *(None,) * 4,
            *ops.encode(keywords["spec"]),
            1.0,
            2.0,
            "auto",
            needs,
            torch.float32,
            None,
            [8, 1] if linear else [],
        ),
    )
    torch.library.opcheck(
        torch.ops.gac_kernels.logprobs.default,
        (rows, *head, batch.targets, 0.7, 2.0, "auto", torch.float32, None, True),
    )


def test_spec_encode_decode_round_trip() -> None:
    spec = LossSpec(None, 0.28, 3.0, 0.1, "k2", 0.01, "trust", 0.2, "constant", "sequence", 99)
    assert ops.decode(*ops.encode(spec)) == spec
    assert ops.decode(*ops.encode(LossSpec())) == LossSpec()
