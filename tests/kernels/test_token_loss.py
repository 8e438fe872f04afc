"""`fused_linear_token_loss` against autograd on all logits in float64."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gac_kernels import fused_linear_token_loss, reference
from gac_kernels.contract import MORE_OUTPUTS
from tests.kernels.cases import each_backend
from tests.kernels.emulated_gemm import emulate
from tests.kernels.test_linear import WorkCounter

B, T, H, V = 3, 6, 8, 37
PAGE = Path(__file__).resolve().parents[2] / "docs" / "loss.md"


def recipes() -> dict[str, Callable[..., Tensor]]:
    """The functions of the documentation."""
    text = PAGE.read_text()
    section = text[text.index("## Your own loss") : text.index("## Several targets per token")]
    namespace: dict = {"torch": torch}
    for function in re.findall(r"^def \w+\(.*?(?=\n\n\n|^```)", section, re.MULTILINE | re.DOTALL):
        exec(function, namespace)
    return {k: f for k, f in namespace.items() if k not in ("torch", "__builtins__")}


RECIPES = recipes()


def batch(dtype: torch.dtype = torch.float64) -> dict:
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731 - short
    targets = torch.randint(V, (B, T), generator=g)
    targets[1, 3:] = targets[0, 1] = -100
    leaves = normal(B, T, H), normal(V, H), normal(V)
    return {
        "leaves": [x.to(dtype).requires_grad_() for x in leaves],
        "targets": targets,
        "advantage": normal(B, T).to(dtype),
        "old_logps": (-normal(B, T).abs() - 3).to(dtype),
        "temperature": (normal(B, T).abs() + 0.5).to(dtype),
    }


def inputs_of(function: Callable[..., Tensor], x: dict) -> list[Tensor]:
    """The tensors that a recipe takes after logps and entropy."""
    names = function.__code__.co_varnames[2 : function.__code__.co_argcount]
    return [x.get(name, x["old_logps"]) for name in names]


def evaluate(call, function, x: dict, inputs: list[Tensor], **keywords) -> tuple[Tensor, ...]:
    hidden, weight, bias = x["leaves"]
    out = call(hidden, weight, x["targets"], function, *inputs, bias=bias, **keywords)
    return *out, *torch.autograd.grad(3 * out[0], x["leaves"])


@each_backend
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_equal_autograd(name: str, backend: str) -> None:
    """Values and gradients, with temperatures per token and several chunks."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    exact, x, function = batch(), batch(dtype), RECIPES[name]
    keywords = {"temperature": exact["temperature"], "logit_scale": 0.8, "softcap": 4.0}
    truth = evaluate(
        reference.fused_linear_token_loss, function, exact, inputs_of(function, exact), **keywords
    )
    keywords |= {"backend": backend, "chunk_bytes": 3 * 8 * V}
    ours = evaluate(fused_linear_token_loss, function, x, inputs_of(function, x), **keywords)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for value, expected in zip(ours, truth, strict=True):
        assert value.dtype == dtype
        assert value.shape == expected.shape
        torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
    assert truth[-1].abs().max() > 0.01


def test_a_temperature_per_sequence_is_that_of_its_tokens() -> None:
    x, one = batch(), torch.tensor([0.5, 1.0, 2.0])
    keywords = [{"temperature": t} for t in (one, one[:, None].expand(B, T))]
    results = [evaluate(fused_linear_token_loss, RECIPES["focal"], x, [], **k) for k in keywords]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_further_outputs_and_inputs_of_any_dtype() -> None:
    """They follow the inputs, detached; the result has them by name."""
    x, seen = batch(), []
    flags = torch.arange(B * T).view(B, T) % 2 == 0

    def loss(logps: Tensor, entropy: Tensor, flag: Tensor, *more: Tensor) -> Tensor:
        seen.append((logps.requires_grad, entropy.requires_grad, flag.dtype, len(logps)))
        assert not any(m.requires_grad for m in more)
        assert more[0].dtype == torch.bool
        return torch.where(flag, -logps * more[1].exp(), more[0].to(logps.dtype))

    outputs = MORE_OUTPUTS[2], MORE_OUTPUTS[0]
    arguments = loss, x, [flags]
    truth = evaluate(reference.fused_linear_token_loss, *arguments, outputs=outputs)
    seen.clear()
    ours = evaluate(fused_linear_token_loss, *arguments, outputs=outputs, chunk_bytes=8 * 4 * V)
    torch.testing.assert_close(ours, truth)
    assert {s[:3] for s in seen} == {(True, True, torch.bool)}
    assert sum(s[3] for s in seen) == int((x["targets"] != -100).sum())
    assert len(seen) > 2
    out = fused_linear_token_loss(
        *x["leaves"][:2], x["targets"], loss, flags, bias=x["leaves"][2], outputs=outputs
    )
    torch.testing.assert_close((out.is_top1, out.log_sum_sq_probs), ours[4:6])
    assert not out.losses.requires_grad
    assert (out.losses[x["targets"] == -100] == 0).all()


@pytest.mark.parametrize("gone", [0, 4, 14])
def test_rows_without_a_derivative_need_only_the_forward_gemm(gone: int) -> None:
    x = batch(torch.float32)
    live = (x["targets"] != -100).flatten().nonzero().squeeze(1)
    share = torch.ones(B * T)
    share[live[torch.randperm(14)[:gone]]] = 0
    share = share.view(B, T)
    with WorkCounter() as work:
        loss = lambda logps, entropy, s: -s * logps  # noqa: E731 - short
        grads = evaluate(fused_linear_token_loss, loss, x, [share], chunk_bytes=5 * 4 * V)[-3:]
    assert work.flops == (14 * 2 + (14 - gone) * 4) * H * V
    truth = evaluate(reference.fused_linear_token_loss, loss, batch(), [share.double()])[-3:]
    for grad, expected in zip(grads, truth, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])  # of a chunk, in blocks of one row
@pytest.mark.parametrize(
    "shares", [(1e-6, 1), (0, 1e-7), (1, 1e-3, 0, 1), (1e-6, 1, 0, 1e3, 1e8, 1e-2)]
)
def test_float16_derivatives_of_any_size(
    shares: tuple[float, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The derivatives of a later block may be larger; the gradient of a GPU's logits is float16."""
    if rows == 3:
        emulate(monkeypatch, torch.float16)
    keywords = {"chunk_bytes": {1: 4, 3: 13}[rows] * V}
    hidden, *head = (x.detach() for x in batch(torch.float16)["leaves"])
    targets, share, results = torch.arange(len(shares)), torch.tensor(shares), []
    for call, dtype, options in (
        (fused_linear_token_loss, torch.float16, keywords),
        (reference.fused_linear_token_loss, torch.float64, {}),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden[0, : len(shares)], *head)]
        loss = lambda logps, entropy, s: -s * (logps + 0.1 * entropy)  # noqa: E731 - short
        out = call(*leaves[:2], targets, loss, share, bias=leaves[2], **options)
        results.append(torch.autograd.grad(out[0] / max(shares), leaves))
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(
            ours.double(), truth, rtol=2e-3, atol=2e-3 * truth.abs().max().item()
        )


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_frozen_operands_and_constant_losses(needs: tuple[bool, bool]) -> None:
    x = batch(torch.float32)
    for leaf, need in zip(x["leaves"], (*needs, False), strict=True):
        leaf.requires_grad_(need)
    hidden, weight, _ = x["leaves"]
    for function in (RECIPES["dft"], lambda logps, entropy: torch.ones_like(logps)):
        out = fused_linear_token_loss(hidden, weight, x["targets"], function)
        assert out.loss.requires_grad == any(needs)
        if any(needs):
            out.loss.backward()
    assert out.loss == 14
    assert out.losses.sum() == 14


def test_compiled_with_one_graph_break() -> None:
    x = batch(torch.float32)

    def call(hidden: Tensor, weight: Tensor) -> Tensor:
        return fused_linear_token_loss(2 * hidden, weight, x["targets"], RECIPES["focal"]).loss * 2

    leaves = x["leaves"][:2]
    expected = torch.autograd.grad(call(*leaves), leaves)
    torch.compiler.reset()
    grads = torch.autograd.grad(torch.compile(call, backend="aot_eager")(*leaves), leaves)
    torch.testing.assert_close(grads, expected)
    assert torch._dynamo.explain(call)(*leaves).graph_break_count == 1


def test_graph_capture_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are then multiplied; those without a loss add nothing, even if they are nan."""
    x = batch(torch.float32)
    expected = evaluate(fused_linear_token_loss, RECIPES["focal"], x, [])
    x["leaves"][0].data[x["targets"] == -100] = torch.nan
    monkeypatch.setattr("gac_kernels.tokens.capturing", lambda device: True)
    monkeypatch.setattr(Tensor, "tolist", None)
    found = evaluate(fused_linear_token_loss, RECIPES["focal"], x, [])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"function": lambda logps, entropy, a: logps.sum()},
            r"token_loss returned \[\]: return one",
        ),
        ({"function": lambda logps, entropy, a: None}, "token_loss returned NoneType: return one"),
        ({"function": 3}, "token_loss is a int: use a function"),
        ({"input": torch.ones(B, T + 1)}, r"inputs\[0\] has shape \[3, 7\]: expected \[3, 6\]"),
        ({"input": [1.0]}, r"inputs\[0\] is a list: use a tensor"),
        (
            {"input": torch.ones(B, T, device="meta")},
            r"inputs\[0\] is on meta: move it to cpu",
        ),
        ({"input": torch.ones(B, T).requires_grad_()}, r"inputs\[0\] requires a gradient"),
        ({"temperature": torch.zeros(B)}, r"temperature\[0\] = 0.0: use finite numbers > 0"),
        ({"temperature": torch.ones(4)}, r"temperature has shape \[4\]: expected \[3\] or"),
        ({"temperature": torch.ones(B).requires_grad_()}, "temperature requires a gradient"),
        ({"outputs": ("entropy",)}, "outputs="),
    ],
)
def test_errors_name_the_argument(changes: dict, message: str) -> None:
    x = batch(torch.float32)
    function = changes.pop("function", lambda logps, entropy, a: -a * logps)
    inputs = changes.pop("input", x["advantage"])
    with pytest.raises((TypeError, ValueError), match=message):
        fused_linear_token_loss(*x["leaves"][:2], x["targets"], function, inputs, **changes)
