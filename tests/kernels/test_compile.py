"""torch.compile: the public functions are custom operators and cause no graph breaks."""

import functools
import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example as always
from hypothesis import given, settings
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config

from gac_kernels import (
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    loss_from_logprobs,
    token_logprobs,
)
from gac_kernels.contract import CHOICES, MORE_OUTPUTS
from tests.kernels import test_options as options
from tests.kernels.cases import BY_NAME, Batch, build, require_backend


def test_float16_weight_gradient_and_values_at_run_time() -> None:
    """The custom operator returns `inv_scale`, which unscales float16 gradients.

    A compiled graph checks the values of each call.
    """
    batch = build(BY_NAME["one"], torch.float16)

    def call(batch: Batch):
        out = fused_linear_gac_loss(
            batch.hidden, batch.weight, *batch.inputs, **batch.keywords, moments=False
        )
        assert out.moments is None
        assert not out.demo_loss.requires_grad
        return out.loss

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = batch.hidden, batch.weight
    grads = torch.autograd.grad(compiled(batch), leaves)
    expected = torch.autograd.grad(call(batch), leaves)
    assert [g.dtype for g in grads] == [torch.float16] * 2
    torch.testing.assert_close(grads, expected)
    batch.targets[0, 0] = 101
    with pytest.raises(ValueError, match=r"targets\[0, 0\] = 101"):
        compiled(batch)


SPEC = LossSpec(kl_coef=0.1, entropy_coef=0.05, temperature=0.7)
BACKENDS = ("native", "triton", "reference")
FULL = pytest.mark.full(reason="seconds to compile; the other tests compile for these backends")


def example(
    rows: int, width: int, logps: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A batch whose logits and hidden states have transposed rows: [T, B, X] seen as [B, T, X].

    With `logps`, also for `loss_from_logprobs`, which is no operator: its trace takes longest.
    """
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
        "targets": targets,
        "advantages": torch.randn(rows),
        "is_demo": torch.arange(rows) % 2 == 1,
        "old_logps": torch.randn(rows, width) - 4,
        "ref_logps": torch.randn(rows, width) - 4,
        "mu": torch.tensor(0.3),
        **(
            {
                "logps": (torch.randn(rows, width) - 4).requires_grad_(),
                "entropy": torch.rand(rows, width).requires_grad_(),
            }
            if logps
            else {}
        ),
    }


def every_function(x: dict[str, torch.Tensor], spec: LossSpec, backend: str):
    """Call every public function; all results as one tuple of tensors."""
    targets, weight, bias = x["targets"], x["weight"], x["bias"]
    args = targets, x["advantages"], x["is_demo"]
    keywords = {name: x[name] for name in ("old_logps", "ref_logps", "mu")} | {"spec": spec}
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
    ("backend", "dtype", "compiler"),
    [
        pytest.param("native", torch.float16, "aot_eager", marks=FULL),
        ("triton", torch.bfloat16, "aot_eager"),
        pytest.param("reference", torch.float64, "aot_eager", marks=FULL),
        pytest.param(
            *("native", torch.float32, "inductor"),
            marks=pytest.mark.slow(reason="compiles every function"),
        ),
    ],
)
def test_every_function_equals_eager(backend: str, dtype: torch.dtype, compiler: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(every_function, fullgraph=True, backend=compiler)
    backend = require_backend(backend, dtype)
    with inductor_config.patch({"cpp.vec_isa_ok": False}):  # a third of the time to compile
        check_every_function(compiled, example(2, 3, dtype=dtype), SPEC, backend)


@pytest.mark.slow(reason="compiles every function")
@pytest.mark.parametrize("logps", [False, pytest.param(True, marks=FULL)])
def test_one_graph_serves_every_size_and_mu_and_others_autocast_and_a_frozen_weight(
    logps: bool,
) -> None:
    """The controller changes mu at every step; as a tensor, it is not a constant of the graph."""
    backend, counter = require_backend("native"), CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(every_function, fullgraph=True, backend=counter, dynamic=True)
    graphs = set()
    for rows, width, mu in (2, 3, 0.3), (3, 4, 0.31), (5, 2, 0.4):
        x = example(rows, width, logps) | {"mu": torch.tensor(mu)}
        check_every_function(compiled, x, SPEC, backend)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1
    x = example(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        check_every_function(compiled, x, SPEC, backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, SPEC, backend), every_function(x, SPEC, backend))
    x["weight"].requires_grad_(False)
    check_every_function(compiled, x, SPEC, backend)


@pytest.mark.parametrize("form", ["logits", "linear"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(form: str, backend: str) -> None:
    x, linear = example(2, 3), form == "linear"
    some = {"test_utils": ("test_schema", "test_faketensor")}  # the traces are those of native
    opcheck = functools.partial(torch.library.opcheck, **({} if backend == "native" else some))
    targets, needs = x["targets"], [True, linear, linear]
    operands = (
        (x["hidden"].flatten(0, 1), x["weight"], x["bias"]) if linear else (x["logits"], None, None)
    )
    scaling = torch.rand(6) + 0.5, 1.0, 2.0, require_backend(backend)
    op = *operands, targets.flatten(), *scaling, torch.float32, None
    operators = torch.ops.gac_kernels
    inputs = targets, x["advantages"], x["is_demo"], torch.tensor(0.3), x["old_logps"]
    teacher: Any = (-torch.rand(2, 3, 4), torch.arange(4).expand(2, 3, 4)) if linear else None
    spec = replace(SPEC, teacher_coef=float(linear), teacher_loss="forward_kl")
    settings = *(teacher or (None, None)), spec.encode(), needs
    arguments = *op, *inputs, x["ref_logps"], *(None,) * 6, *settings
    opcheck(operators.loss.default, arguments)
    opcheck(operators.logprobs.default, (*op, True))
    frozen = (None if y is None else y.detach() for y in operands)
    arguments = *frozen, *op[3:], torch.rand(4, targets.numel()), needs
    opcheck(operators.logprobs_backward.default, arguments)


def test_spec_encode_decode_round_trip() -> None:
    spec = LossSpec(
        *(None, 0.28, 3.0, 0.1, "k2", 0.01, "trust", 0.2, "constant", "sequence", 99, 0.7),
        *("sapo", (0.5, 2.0), "sequence", "token_mask", 0.1, None, True, 0.5, "reverse_kl"),
    )
    assert LossSpec.decode(spec.encode()) == spec
    assert LossSpec.decode(LossSpec().encode()) == LossSpec()


def compiling(operators: bool = True) -> Any:
    """Use the operators of torch.compile, without compiling anything."""
    return mock.patch.object(torch.compiler, "is_compiling", return_value=operators)


@settings(deadline=None, max_examples=8, derandomize=True)
@always(
    options.make(LossSpec(importance_sampling_level="sequence", demo_weight="shaped"))[0]._replace(
        inputs=(torch.arange(12), torch.ones(3), torch.arange(3) < 1)
    )
)
@given(options.batches())
def test_operators(batch: options.Batch) -> None:
    with compiling():
        options.check_kernels(batch, require_backend("native"))


def test_shapes_of_a_packed_batch(request: pytest.FixtureRequest) -> None:
    """The operators for fake tensors give the shapes and dtypes of all results, also with frozen
    inputs and another default dtype.
    """
    batch, _ = options.make(LossSpec())
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    operators, encoded = torch.ops.gac_kernels, LossSpec().encode()
    inputs = *batch.inputs, torch.tensor(0.3), None, None, batch.keywords["cu_seqlens"]
    for dtype, needs in (
        (torch.float32, [True, False, True]),
        (torch.float16, [False, True, True]),
        (torch.bfloat16, [True, True, False]),
    ):
        operands = [
            x.to(dtype).detach().requires_grad_(n) for x, n in zip(batch.leaves, needs, strict=True)
        ]
        op = *operands, batch.inputs[0], None, 0.7, None, "reference", dtype, None
        frozen = *(x.detach() for x in operands), *op[3:]
        for operator, arguments in (
            (operators.loss, (*op, *inputs, *(None,) * 7, encoded, needs)),
            (operators.logprobs, (*op, needs[0])),
            (operators.logprobs_backward, (*frozen, torch.rand(4, 12), needs)),
        ):
            torch.library.opcheck(operator.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("operators", [False, True])
def test_scaled_float16_gradients_are_unscaled_in_float32(operators: bool) -> None:
    """The scaled gradient of the weight, 0.5 x 200 x 4000, exceeds float16's range."""
    hidden, weight = torch.full((1, 200, 1), 4e3).half(), torch.zeros(2, 1).half().requires_grad_()
    inputs = torch.zeros(1, 200).long(), torch.ones(1), torch.tensor([True])
    spec = LossSpec(demo_weight="one")
    with compiling(operators):
        losses = [
            fused_linear_gac_loss(hidden, weight, *inputs, mu=1.0, spec=spec).loss for _ in range(2)
        ]
    if operators:  # the first pass leaves the saved gradient as it is
        losses[1] = losses[0]
    for loss, factor in zip(losses, (0.5, 1.0), strict=True):
        (grad,) = torch.autograd.grad(loss, weight, torch.tensor(factor), retain_graph=operators)
        assert grad.tolist() == [[-2e3 * factor], [2e3 * factor]]


def test_operators_check_values() -> None:
    batch, _ = options.make(LossSpec())
    hidden, weight, _ = batch.leaves
    targets, *rest = batch.inputs
    wrong = targets.clone()
    wrong[3] = options.V
    with compiling():
        for changes, message in (
            ({"weights": torch.tensor([1.0, -2.0, 0.0])}, r"weights\[1\] = -2.0"),
            ({"temperatures": torch.tensor([1.0, 0.0, 1.0])}, r"temperatures\[1\] = 0.0: use"),
            ({"cu_seqlens": torch.tensor([0, 4, 8, 11])}, r"cu_seqlens=\[0, 4, 8, 11\]: use"),
            ({"targets": wrong}, r"targets\[3\] = 13"),
        ):
            keywords = {"targets": targets, **batch.keywords, **changes}
            inputs = keywords.pop("targets"), *rest
            with pytest.raises(ValueError, match=message):
                fused_linear_gac_loss(hidden, weight, *inputs, **keywords)
            with pytest.raises(ValueError, match=message):
                fused_gac_loss(hidden @ weight.T, *inputs, **keywords)
        for given, temperature, text in (
            (wrong, 1.0, message),
            (targets, torch.zeros(len(targets)), r"temperature\[0\] = 0"),
        ):
            with pytest.raises(ValueError, match=text):
                linear_token_logprobs(hidden, weight, given, temperature=temperature)


LOSSES: dict[str, Any] = {
    "fused": lambda x, w, batch: fused_gac_loss(x @ w.T, *batch.inputs, **batch.keywords).loss,
    "linear": lambda x, w, batch: fused_linear_gac_loss(x, w, *batch.inputs, **batch.keywords).loss,
    "logprobs": lambda x, w, batch: token_logprobs(x @ w.T, batch.inputs[0])[1].neg_().sum(),
    "linear logprobs": lambda x, w, batch: (
        linear_token_logprobs(x, w, batch.inputs[0])[0].neg_().sum()
    ),
}


class Cut(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_double_backward_is_refused_and_a_missing_gradient_passed_on(
    name: str, operators: bool
) -> None:
    require_backend("native")
    batch, _ = options.make(LossSpec())
    hidden, weight, _ = options.copies(batch.leaves, torch.float32)
    with compiling(operators):
        loss = LOSSES[name](hidden, weight, batch)
    Cut.apply(loss).backward(retain_graph=True)
    assert hidden.grad is None or not hidden.grad.any()
    with pytest.raises(RuntimeError, match="differentiable once.*gac_kernels.reference"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("backend", "ratio", "operators"),
    [
        *itertools.product(
            ["native", "reference"], CHOICES["importance_sampling_level"], [False, True]
        ),
        ("triton", "token", False),
    ],
)
def test_torchs_default_dtype_and_device_are_not_used(
    backend: str, ratio: str, operators: bool
) -> None:
    """All results are on the device of the inputs, with the same values."""
    require_backend(backend)
    spec = LossSpec(
        importance_sampling_level=ratio, correction="token_truncate", kl_coef=0.1, entropy_coef=0.1
    )
    batch, logps = options.make(spec, rollout_norm=3.0, demo_norm=torch.tensor(5.0))
    columns = {f"{name}_logps": logps + 0.1 for name in ("old", "ref", "rollout")}
    keywords = {**batch.keywords, **columns, "weights": torch.tensor([1.0, 0.5, 2.0])}
    more = {"outputs": MORE_OUTPUTS, "backend": backend}

    def results() -> list[torch.Tensor]:
        leaves = options.copies(batch.leaves, torch.float32)
        logits = torch.nn.functional.linear(*leaves)
        outs = [fused_gac_loss(logits, *batch.inputs, **keywords, backend=backend)]
        stats = token_logprobs(logits, batch.inputs[0], **more)
        if backend != "triton":  # the interpreter is slow
            linear_keywords = {**keywords, "bias": leaves[2]}
            outs.append(
                fused_linear_gac_loss(
                    *leaves[:2], *batch.inputs, **linear_keywords, backend=backend
                )
            )
            stats += linear_token_logprobs(*leaves[:2], batch.inputs[0], **more)
            outs.append(loss_from_logprobs(stats[0], *batch.inputs, entropy=stats[1], **keywords))
        parts = [x for out in outs for x in (*out[:7], *vars(out.moments).values())]
        grads = options.gradients(sum(out.loss for out in outs) + stats[-4].sum(), leaves)
        return [*parts, *stats, *grads]

    with compiling(operators):
        with torch.device("meta"):
            torch.set_default_dtype(torch.float64)
            try:
                actual = results()
            finally:
                torch.set_default_dtype(torch.float32)
        expected = results()
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert x.device == y.device
        assert torch.equal(x, y)
