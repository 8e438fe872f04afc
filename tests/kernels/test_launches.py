"""How many kernels each public function launches on a GPU, and how often the host waits for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gac_kernels
from gac_kernels import LossSpec
from gac_kernels.tokens import WORTH_SKIPPING
from tests.device_trace import Trace, trace

pytest.importorskip("triton")

B, T, V, H = 3, 5, 33, 8
DRAW = torch.Generator().manual_seed(0)
TARGETS = torch.randint(V, (B, T), generator=DRAW).index_fill(1, torch.tensor(3), -100)
ROLLOUTS = (TARGETS, torch.tensor([1.0, -1.0, 2.0]))
MIXED = (*ROLLOUTS, torch.tensor([False, True, False]))
OLD = {"old_logps": -torch.rand(B, T, generator=DRAW)}
SEQUENCE = LossSpec(importance_sampling_level="sequence")


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW).requires_grad_()


LOGITS, HIDDEN, WEIGHT, LOGPS = leaf(B, T, V), leaf(B, T, H), leaf(V, H), leaf(B, T)
HEAD = HIDDEN, WEIGHT
# call; launches and waits of the forward pass, and of the backward pass
CASES: dict[str, tuple[Callable[[], Any], tuple[int, int], tuple[int, int]]] = {
    "fused_gac_loss": (
        lambda: gac_kernels.fused_gac_loss(LOGITS, *MIXED, mu=0.5).loss,
        (5, 0),
        (1, 0),
    ),
    "token_logprobs": (
        lambda: gac_kernels.token_logprobs(LOGITS, TARGETS)[0],
        (3, 0),
        (2, 0),
    ),
    "fused_linear_gac_loss": (
        lambda: gac_kernels.fused_linear_gac_loss(*HEAD, *MIXED, mu=0.5).loss,
        (9, 0),
        (2, 0),
    ),
    "fused_linear_gac_loss with two passes": (
        lambda: gac_kernels.fused_linear_gac_loss(*HEAD, *ROLLOUTS, spec=SEQUENCE, **OLD).loss,
        (90, 0),
        (2, 0),
    ),
    "linear_token_logprobs": (
        lambda: gac_kernels.linear_token_logprobs(*HEAD, TARGETS)[0],
        (4, 0),
        (7, 0),
    ),
    "fused_linear_token_loss": (
        lambda: gac_kernels.fused_linear_token_loss(*HEAD, TARGETS, lambda logps, _: -logps).loss,
        (36, 2),
        (2, 0),
    ),
    "loss_from_logprobs": (
        lambda: gac_kernels.loss_from_logprobs(LOGPS, *MIXED, mu=0.5).loss,
        (148, 0),
        (21, 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_launches_and_waits(name: str) -> None:
    call, forward, backward = CASES[name]
    with trace() as found:
        out = call()
    assert len(found.launches) <= forward[0], found.summary()
    assert len(found.waits) <= forward[1], found.summary()
    upstream, leaves = torch.ones_like(out), [LOGITS, *HEAD, LOGPS]
    with trace() as found:
        torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    assert len(found.launches) <= backward[0], found.summary()
    assert len(found.waits) <= backward[1], found.summary()


# waits of the forward pass, and of the backward pass, where skipping rows can pay: if one block has
# all rows, and if not
WAITS: dict[str, tuple[Callable[..., Any], tuple[int, int], tuple[int, int]]] = {
    "log-probs": (
        lambda **options: gac_kernels.linear_token_logprobs(*HEAD, TARGETS, **options)[0],
        (0, 1),
        (1, 1),
    ),
    "loss": (
        lambda **options: gac_kernels.fused_linear_gac_loss(*HEAD, *MIXED, mu=0.5, **options).loss,
        (1, 0),
        (1, 0),
    ),
    "two passes": (
        lambda **options: (
            gac_kernels.fused_linear_gac_loss(
                *HEAD, *ROLLOUTS, spec=SEQUENCE, **OLD, **options
            ).loss
        ),
        (1, 0),
        (1, 0),
    ),
}


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("rows", [B * T, B * T - 1], ids=["one block", "two blocks"])
def test_waits_where_skipping_rows_can_pay(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a gradient, the host waits only if the first GEMM does not have all rows."""
    monkeypatch.setitem(WORTH_SKIPPING, torch.float32, 0)
    call, *waits = WAITS[name]
    forward, backward = waits[rows < B * T]
    options = {"chunk_bytes": rows * 4 * V}
    with trace() as found:
        out = call(**options)
    assert len(found.waits) == forward, found.summary()
    with trace() as found:
        torch.autograd.grad(out, HEAD, torch.ones_like(out))
    assert len(found.waits) == backward, found.summary()
    with torch.no_grad(), trace() as found:
        call(**options)
    assert len(found.waits) == (rows < B * T), found.summary()


def names(found: Trace) -> tuple[list[str], list[str]]:
    return [event.name for event in found.launches], [event.name for event in found.waits]


def test_what_counts_as_a_launch() -> None:
    x = torch.arange(6.0).view(2, 3)
    with trace() as found:
        y = x.t()[1:].view(2, 1, 2)  # views
        torch.empty(5)
        torch.zeros(0)
        y.add(1).mul_(2)
        torch.where(x > 0, x, 0)
        torch.mm(x, x.t(), out=torch.empty(2, 2))
    assert names(found) == (["add", "mul_", "gt", "where", "mm"], [])


def test_what_counts_as_a_wait() -> None:
    x, mask = torch.arange(3.0), torch.tensor([True, False, True])
    with trace() as found:
        x.sum().item()
        x.tolist()
        float(x[0])
        bool(mask.any())
        x[mask]
        x.clone()[mask] = 1.0  # a fill by a number needs no positions
        x.masked_select(mask)
        mask.nonzero()
        x.cpu()
        x[torch.tensor([0, 2])]
        mask.nonzero_static(size=2)
    waits = ["_local_scalar_dense", "tolist", *["_local_scalar_dense"] * 2]
    assert names(found)[1] == [*waits, "index", "masked_select", "nonzero", "cpu"]


def test_reads_in_a_backward_pass_are_seen() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            grad.tolist()
            return grad

    x = torch.ones(2, requires_grad=True)
    with trace() as found:
        Reads.apply(x).sum().backward()
    assert names(found)[1] == ["tolist"]
    (event,) = found.waits
    assert f"{__file__}:" in event.place
