"""Interleaved timing of providers, and of the machine's limits in the same run.

Providers alternate round by round, so that changes in clocks or load affect all of them; ratios in
tables compare minimum times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from .settings import tiny


class Timing(NamedTuple):
    """Times of one provider, in milliseconds."""

    best: float
    median: float
    rounds: int


Step = Callable[[], object]
# clock cycles, 6 ms at 2 GHz: kernel launches run ahead of the GPU, as in training. The host needs
# up to 3 ms for a loss.
HEAD_START = 12_000_000


def once(step: Step, device: torch.device) -> float:
    """Time of one call in milliseconds; on a GPU, between two events on its stream.

    On a GPU, the stream is kept busy until the host has queued the first launches. Otherwise launch
    latency would make a row kernel of about a millisecond look slower than it is.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(HEAD_START)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end)


def interleave(
    steps: Mapping[str, Step],
    device: torch.device,
    seconds: float,
    min_rounds: int | None = None,
    prepare: Callable[[str], object] | None = None,
) -> dict[str, Timing]:
    """Time all steps in alternation, after one warm-up round.

    seconds: minimum total time.
    min_rounds: minimum number of rounds; default: 5, or 1 if `seconds` is 0.
    prepare: called with the step's name before each step, untimed.
    """
    min_rounds = min_rounds or (5 if seconds else 1)
    times: dict[str, list[float]] = {name: [] for name in steps}
    stop = None
    while stop is None or min(map(len, times.values())) < min_rounds or time.perf_counter() < stop:
        for name, step in steps.items():
            if prepare:
                prepare(name)
            milliseconds = once(step, device)
            if stop is not None:
                times[name].append(milliseconds)
        stop = stop or time.perf_counter() + seconds
    return {n: Timing(min(t), statistics.median(t), len(t)) for n, t in times.items()}


def runnable(steps: Mapping[str, Step], failed: dict[str, str]) -> dict[str, Step]:
    """The steps that run without error; adds the errors of the others to `failed`."""
    passing = {}
    for name, run in steps.items():
        try:
            run()
        except Exception as error:  # a provider may raise anything; its row says why
            failed[name] = first_line(error)
        else:
            passing[name] = run
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # memory left behind by failed steps
    return passing


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def peak_mib(step: Step, device: torch.device) -> float:
    """Peak memory during one call, in MiB above the memory allocated before it; nan on a CPU."""
    if device.type == "cpu":
        return math.nan
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def gemm_step(hidden: torch.Tensor, weight: torch.Tensor) -> Step:
    """The three GEMMs of a linear loss on whole matrices, and nothing else: 6 N H V FLOPs.

    A softmax stands in for the gradient of the logits: a power-limited GPU multiplies small numbers
    faster than random noise.
    """
    x, w = hidden.detach().flatten(0, -2), weight.detach()
    logits = x @ w.T
    gradient = torch.empty_like(logits)
    for destination, rows in zip(gradient.split(1024), logits.split(1024), strict=True):
        destination.copy_(rows.float().softmax(-1) / len(x))
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def step() -> None:
        torch.mm(x, w.T, out=logits)
        torch.mm(gradient, w, out=dx)
        torch.mm(gradient.T, x, out=dw)

    return step


def copy_bandwidth(device: torch.device, size: int = tiny(4 << 30, 1 << 20)) -> float:
    """Bandwidth of a copy in device memory in GB/s, counting reads and writes."""
    a = torch.zeros(size // 4, device=device).normal_()
    b = torch.empty_like(a)
    timing = interleave({"copy": lambda: b.copy_(a)}, device, seconds=0.3)["copy"]
    return 2 * a.nbytes / timing.best / 1e6
