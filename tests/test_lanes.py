"""Chunks in flight change when row kernels run, never a bit of what they compute."""

from __future__ import annotations

import pytest
import torch

from gac_kernels import fused_linear_gac_loss, lanes, linear_token_logprobs
from gac_kernels.lanes import Lane

from .cases import BY_NAME, build


def late(monkeypatch: pytest.MonkeyPatch, depth: int) -> list[str]:
    """`depth` chunks in flight, each row kernel as late as a stream of its own may run it."""
    started: list[str] = []

    def start(lane: Lane, work):
        started.append("start")
        return work

    def wait(lane: Lane, work) -> None:
        started.append("wait")
        work()

    monkeypatch.setitem(lanes.IN_FLIGHT, "cpu", depth)
    monkeypatch.setattr(Lane, "start", start)
    monkeypatch.setattr(Lane, "wait", wait)
    return started


def loss_and_gradients(budget: int) -> list[torch.Tensor]:
    batch = build(BY_NAME["wide"])
    out = fused_linear_gac_loss(
        batch.hidden, batch.weight, batch.targets, batch.advantages, batch.is_demo,
        bias=batch.bias, chunk_bytes=budget, **batch.keywords,
    )  # fmt: skip
    grads = torch.autograd.grad(out.loss, [batch.hidden, batch.weight, batch.bias])
    return [out.loss, out.logps, out.entropy, *grads]


def logprobs_and_gradients(budget: int) -> list[torch.Tensor]:
    batch = build(BY_NAME["wide"])
    logps, entropy = linear_token_logprobs(
        batch.hidden, batch.weight, batch.targets, bias=batch.bias, chunk_bytes=budget
    )
    loss = (logps - 0.3 * entropy).square().sum()
    return [logps, entropy, *torch.autograd.grad(loss, [batch.hidden, batch.weight, batch.bias])]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("call", [loss_and_gradients, logprobs_and_gradients])
def test_late_row_kernels_change_nothing(
    call, depth: int, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one row: `depth` of them share the budget. A buffer reused too soon would show."""
    vocab = build(BY_NAME["wide"]).weight.shape[0]
    in_line = call(4 * vocab)
    order = late(monkeypatch, depth)
    beside = call(4 * vocab * depth)
    assert order[:depth] == ["start"] * depth and order.count("wait") == order.count("start") > 3
    for x, y in zip(in_line, beside, strict=True):
        assert torch.equal(x, y)


def test_results_come_in_order_and_nothing_stays_in_flight() -> None:
    lane = Lane(torch.device("cpu"))
    assert lane.depth == 1
    lane.depth, seen = 3, []
    lane.start = lambda work: work  # the latest possible
    lane.wait = lambda work: work()
    spans = [slice(i, i + 1) for i in range(5)]
    lane.each(
        spans,
        lambda span: seen.append(f"L{span.start}") or span.start,
        lambda k: seen.append(f"R{k}"),
        lambda k: seen.append(f"G{k}"),
    )
    assert " ".join(seen) == "L0 L1 L2 R0 G0 L3 R1 G1 L4 R2 G2 R3 G3 R4 G4"
    seen.clear()
    lane.each([], lambda span: None, lambda k: None)
    assert seen == []
