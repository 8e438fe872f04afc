"""torch.compile: the public functions are custom operators and cause no graph breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gac_kernels import (
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    loss_from_logprobs,
    ops,
    token_logprobs,
)

from .cases import BY_NAME, Batch, build, require_backend


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


SPEC = LossSpec(kl_coef=0.1, entropy_coef=0.05, temperature=0.7)
BACKENDS = ("native", "triton", "reference")


def example(rows: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A batch whose logits and hidden states have transposed rows: [T, B, X] seen as [B, T, X]."""
    vocabulary, size = 37, 8

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    targets = torch.randint(vocabulary, (rows, width))
    targets[0, -1] = -100
    return {
        "logits": leaf(width, rows, vocabulary).transpose(0, 1),
        "hidden": leaf(width, rows, size).transpose(0, 1),
        "weight": leaf(vocabulary, size),
        "bias": leaf(vocabulary),
        "logps": (torch.randn(rows, width) - 4).requires_grad_(),
        "entropy": torch.rand(rows, width).requires_grad_(),
        "targets": targets,
        "advantages": torch.randn(rows),
        "is_demo": torch.arange(rows) % 2 == 1,
        "old_logps": torch.randn(rows, width) - 4,
        "ref_logps": torch.randn(rows, width) - 4,
    }


def every_function(x: dict[str, torch.Tensor], spec: LossSpec, backend: str):
    """Call every public function; all results as one tuple of tensors."""
    targets, weight, bias = x["targets"], x["weight"], x["bias"]
    args = targets, x["advantages"], x["is_demo"]
    keywords = {"old_logps": x["old_logps"], "ref_logps": x["ref_logps"], "spec": spec}
    scaling = {"logit_scale": 0.5, "softcap": 4.0, "backend": backend}
    outputs = "mean_logits", "is_top1"
    losses = (
        fused_gac_loss(x["logits"], *args, **keywords, **scaling),
        fused_linear_gac_loss(x["hidden"], weight, *args, bias=bias, **keywords, backend=backend),
    )
    if "logps" in x:
        losses += (loss_from_logprobs(x["logps"], *args, entropy=x["entropy"], **keywords),)
    logprobs = (
        token_logprobs(x["logits"], targets, outputs=outputs, **scaling),
        linear_token_logprobs(x["hidden"], weight, targets, bias=bias, backend=backend),
    )
    moments = (
        x for m in (out.moments for out in losses) for x in (m.rollouts, m.demo_nll, m.totals)
    )
    scalars_and_tokens = (part for out in losses for part in out[:7])
    return *scalars_and_tokens, *moments, *(part for group in logprobs for part in group)


def gradients(results: tuple[torch.Tensor, ...], x: dict[str, torch.Tensor]) -> dict:
    """Gradients of a sum that weighs each differentiable result differently."""
    differentiable = [r.double().sum() for r in results if r.requires_grad]
    total = sum(r * (i + 1) for i, r in enumerate(differentiable))
    leaves = {name: tensor for name, tensor in x.items() if tensor.requires_grad}
    return dict(zip(leaves, torch.autograd.grad(total, leaves.values()), strict=True))


def check_every_function(compiled, x: dict[str, torch.Tensor], spec: LossSpec, backend: str):
    results, expected = compiled(x, spec, backend), every_function(x, spec, backend)
    torch.testing.assert_close(results, expected)
    assert [r.requires_grad for r in results] == [r.requires_grad for r in expected]
    grads, expected_grads = gradients(results, x), gradients(expected, x)
    for name, grad in expected_grads.items():
        # each function's gradient is rounded to the dtype before they are added
        atol = 4 * torch.finfo(grad.dtype).eps * grad.abs().max().item()
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=atol, msg=name)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("native", torch.float16),
        ("native", torch.bfloat16),
        ("triton", torch.float16),
        ("triton", torch.bfloat16),
        ("reference", torch.bfloat16),
        ("reference", torch.float64),
    ],
)
def test_every_function_equals_eager(backend: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    compiled = torch.compile(every_function, fullgraph=True, backend="aot_eager")
    check_every_function(compiled, example(2, 3, dtype), SPEC, require_backend(backend, dtype))


@pytest.mark.slow
def test_every_function_with_dynamic_shapes() -> None:
    """The graph does not depend on the backend."""
    backend = require_backend("native")
    torch.compiler.reset()
    compiled = torch.compile(every_function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, width in (2, 3), (3, 4):
        check_every_function(compiled, example(rows, width), SPEC, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes_and_numbers(backend: str) -> None:
    """The numbers of the spec are dynamic too, so they must not become text of the graph."""
    require_backend(backend)

    def loss(x: dict[str, torch.Tensor], spec: LossSpec) -> torch.Tensor:
        args = x["targets"], x["advantages"], x["is_demo"]
        return fused_gac_loss(
            x["logits"], *args, ref_logps=x["ref_logps"], spec=spec, backend=backend
        ).loss

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, width, coefficient in (2, 3, 0.1), (3, 4, 0.2):
        x, spec = example(rows, width), replace(SPEC, kl_coef=coefficient)
        value, expected = compiled(x, spec), loss(x, spec)
        torch.testing.assert_close(value, expected)
        (grad,) = torch.autograd.grad(value, x["logits"])
        (expected_grad,) = torch.autograd.grad(expected, x["logits"])
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.slow
def test_inductor_with_transposed_rows() -> None:
    """Compiles only operators: `loss_from_logprobs` has none, and would take most of the time."""
    backend = require_backend("native")
    torch.compiler.reset()
    x = example(2, 3)
    del x["logps"], x["entropy"]
    check_every_function(torch.compile(every_function, fullgraph=True), x, SPEC, backend)


@pytest.mark.parametrize("form", ["logits", "linear"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(form: str, backend: str) -> None:
    x, linear = example(2, 3), form == "linear"
    rows = x["hidden" if linear else "logits"]
    head = (x["weight"], x["bias"]) if linear else (None, None)
    targets, needs = x["targets"], [True, linear, linear]
    scaling = 0.7, 2.0, require_backend(backend)
    operators = torch.ops.gac_kernels
    inputs = targets, x["advantages"], x["is_demo"], torch.tensor(0.3), x["old_logps"]
    settings = *ops.encode(SPEC), *scaling, needs, torch.float32, None, [8, 1] if linear else []
    optional = x["ref_logps"], *(None,) * 5
    torch.library.opcheck(operators.loss.default, (rows, *head, *inputs, *optional, *settings))
    gemms = torch.float32, None
    torch.library.opcheck(
        operators.logprobs.default, (rows, *head, targets, *scaling, *gemms, True)
    )
    operands = [None if y is None else y.detach() for y in (rows, *head)]
    stats = torch.rand(4, targets.numel())
    torch.library.opcheck(
        operators.logprobs_backward.default,
        (*operands, targets, stats, *scaling, *gemms, needs),
    )


def test_spec_encode_decode_round_trip() -> None:
    spec = LossSpec(None, 0.28, 3.0, 0.1, "k2", 0.01, "trust", 0.2, "constant", "sequence", 99)
    assert ops.decode(*ops.encode(spec)) == spec
    assert ops.decode(*ops.encode(LossSpec())) == LossSpec()
