"""Chunks in flight: the row kernel of one chunk beside the GEMMs of its neighbours.

With two in flight the caller's stream multiplies L0 L1 G0 L2 G1 L3 ... (L: logits, G: the two
products of the backward), and row kernel k, on a stream of its own, has the time of G(k-1) and
L(k+1). The price is a second buffer of logits, so chunks are half as long.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

# Two overlap; whether that pays more than long chunks do is not measured yet on a GPU.
IN_FLIGHT = {"cpu": 1, "cuda": 1}

Chunk = TypeVar("Chunk")


class Lane:
    """Where row kernels run: in line, or beside the caller's stream on one of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.depth = device, IN_FLIGHT.get(device.type, 1)

    def each(
        self,
        spans: Iterable[slice],
        multiply: Callable[[slice], Chunk],
        rows: Callable[[Chunk], None],
        finish: Callable[[Chunk], None] | None = None,
    ) -> None:
        """For every span in order: multiply, then `rows` beside it, then `finish`.

        A chunk must hold every tensor that `rows` reads, and `rows` must leave its results in
        tensors that the caller made: what it allocates belongs to the other stream.
        """
        flying: deque[tuple[Chunk, Any]] = deque()

        def land() -> None:
            chunk, done = flying.popleft()
            self.wait(done)
            if finish is not None:
                finish(chunk)

        for span in spans:
            chunk = multiply(span)
            flying.append((chunk, self.start(functools.partial(rows, chunk))))
            if len(flying) == self.depth:
                land()
        while flying:
            land()

    def start(self, work: Callable[[], None]) -> Any:
        """Begin after what the caller's stream was given so far; returns what `wait` takes."""
        if self.depth == 1 or self.device.type != "cuda":
            return work()
        stream = _beside(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
            return stream.record_event()

    def wait(self, done: Any) -> None:
        """The caller's stream goes on once that work has ended."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """One per device, or each call would keep memory of its own; first where both have blocks."""
    return torch.cuda.Stream(device, priority=-1)
