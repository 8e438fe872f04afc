"""The linear loss and its three GEMMs, cold and hot: `python3 -m bench.hot_loop`.

A GPU that is limited by its power runs the first milliseconds faster than the seconds after them.
Cold: three steps after four idle seconds. Hot: all programs alternate without a pause; the medians
of the second half. Only ratios of one hot loop compare programs. Clocks and power are sampled
beside.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping

import torch

from gac_kernels import epilogue

from .batches import HEADS, Batch, linear_batch, scaled
from .linear_losses import ours, step
from .record import Record
from .settings import DEVICE, DRY_RUN, tiny
from .timing import Step, gemm_step, once

TOKENS = tuple(dict.fromkeys(scaled(n) for n in (8192, 32768, 2048)))
IDLE_SECONDS, HOT_SECONDS = tiny((4.0, 4.0), (0.0, 0.0))
SAMPLES = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap"


def head_step(head: str, batch: Batch) -> Step:
    """A step with one of `epilogue.HEADS`."""

    def run() -> None:
        os.environ["GAC_HEAD"] = head
        step(ours, batch)

    return run


def hot(steps: Mapping[str, Step], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each step in alternation, queued without waiting; the second half."""
    if device.type == "cpu":
        return {name: [once(run, device)] for name, run in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        events = []
        for name, run in steps.items():
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            run()
            pair[1].record()
            events.append((name, pair))
        torch.cuda.synchronize(device)
        for name, (begin, end) in events:
            times[name].append(begin.elapsed_time(end))
    return {name: x[len(x) // 2 :] for name, x in times.items()}


def cold(run: Step, device: torch.device) -> list[float]:
    """Milliseconds of three steps after a pause."""
    time.sleep(IDLE_SECONDS)
    return [once(run, device) for _ in range(3)]


class Sampler:
    """Samples of a GPU's clock, power and limit while a block of code runs."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def __enter__(self) -> Sampler:
        self.file = tempfile.TemporaryFile("w+")
        self.process = None
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--query-gpu={SAMPLES}", "--format=csv,noheader,nounits"]
            self.process = subprocess.Popen([*command, "-lms", "20"], stdout=self.file)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=10)
        self.file.seek(0)
        self.rows = [line.split(", ") for line in self.file.read().splitlines()]
        self.file.close()

    def summary(self) -> dict[str, float]:
        """The median clock in MHz and power in W, and the share of samples at the power limit."""
        if not self.rows:
            return {}
        clocks, power, capped = zip(*(x for x in self.rows if len(x) == 3), strict=True)
        return {
            "clock": statistics.median(map(float, clocks)),
            "watts": statistics.median(map(float, power)),
            "power limited": sum(x.strip() == "Active" for x in capped) / len(capped),
        }


def measure(shape: str, tokens: int, device: torch.device, record: Record) -> None:
    """Time and record one head and one number of tokens."""
    batch = linear_batch(tokens, HEADS[shape], torch.bfloat16, device)
    steps: dict[str, Callable[[], object]] = {
        "three GEMMs": gemm_step(batch.hidden, batch.weight),
        **{f"ours, {head}": head_step(head, batch) for head in epilogue.HEADS},
    }
    for run in steps.values():  # compile
        run()
    with Sampler() as samples:
        times = hot(steps, device, HOT_SECONDS)
    medians = {name: statistics.median(x) for name, x in times.items()}
    for name, run in steps.items():
        ratio = medians[name] / medians["three GEMMs"]
        first = cold(run, device)
        record.add(
            device=device.type,
            work="hot loop",
            shape=shape,
            tokens=tokens,
            case="",
            provider=name,
            ms=medians[name],
            rounds=len(times[name]),
            ratio=ratio,
            cold_ms=first,
            **samples.summary(),
        )
        print(
            f"{shape} {tokens:6} {name:16} hot {medians[name]:8.2f} ms, {ratio:.3f} of the GEMMs; "
            f"cold {', '.join(f'{x:.2f}' for x in first)} ms",
            flush=True,
        )
    print(f"{shape} {tokens:6} {samples.summary()}", flush=True)
    record.save()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python3 -m bench.hot_loop", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS)[:2])
    options = parser.parse_args(arguments)
    if DRY_RUN:
        from .interpreter import emulate_gpu

        emulate_gpu()
    for tokens in options.tokens:
        for shape in options.heads:
            measure(shape, tokens, torch.device(DEVICE), Record())


if __name__ == "__main__":
    main()
