"""The loss beside its peers on a CPU: `OMP_NUM_THREADS=1 python -m bench.cpu_ratios`, then with 2.

The linear loss beside its three GEMMs and torch's `linear_cross_entropy` per token, and the loss of
given logits beside eager PyTorch, with fresh logits in every call and the C library's own
allocator: page faults count. The programs alternate. A ratio is the median over the rounds of a
program's time divided by ours in the same round, with quartiles: CPU time of one thread, or wall
time of several. Results go to bench/results/cpu-ratios.json, by the number of threads, and the
table to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from gac.evaluation.table import markdown_table
from gac_kernels import fused_gac_loss
from tools.origin import origin
from tools.pages import BENCHMARKS, fill

from .batches import Head, linear_batch
from .bench_cpu_logits import N, V, eager_loss, make_batch
from .linear_losses import ours, providers, step
from .record import device_name
from .settings import RESULTS, tiny
from .timing import Step, gemm_step

STORED = RESULTS / "cpu-ratios.json"
CPU = torch.device("cpu")
TOKENS, HEAD = tiny(2048, 8), tiny(Head(512, 32000), Head(16, 300))
TORCH = "torch linear_cross_entropy, per token"
Seconds = Callable[[], float]  # runs a program once and returns its time


def clock() -> float:
    """CPU time of one thread, which other programs change little; wall time of several."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(program: Step, prepare: Callable[[], object] = lambda: None) -> Seconds:
    def once() -> float:
        prepare()
        start = clock()
        program()
        return clock() - start

    return once


def linear_programs() -> dict[str, Seconds]:
    batch = linear_batch(TOKENS, HEAD, torch.float32, CPU)
    peer = providers(CPU, compiled=False)[0][TORCH].loss
    return {
        "ours": timed(lambda: step(ours, batch)),
        TORCH: timed(lambda: step(peer, batch)),
        "three GEMMs": timed(gemm_step(batch.hidden, batch.weight)),
    }


def logits_programs() -> dict[str, Seconds]:
    """The logits of every call are a fresh tensor, as a model's are."""
    logits, *batch = make_batch()
    fresh: list[torch.Tensor] = []

    def prepare() -> None:
        fresh[:] = [logits.clone().requires_grad_()]

    def fused(*inputs: torch.Tensor) -> torch.Tensor:
        return fused_gac_loss(*inputs, mu=0.5).loss

    return {
        "ours": timed(lambda: fused(fresh[0], *batch).backward(), prepare),
        "eager": timed(lambda: eager_loss(fresh[0], *batch)[0].backward(), prepare),
    }


def ratios(programs: dict[str, Seconds], rounds: int) -> dict[str, list[float]]:
    """Quartiles of each program's time divided by ours, after a round to warm up."""
    found: dict[str, list[float]] = {name: [] for name in programs if name != "ours"}
    for count in range(rounds + 1):
        times = {name: run() for name, run in programs.items()}
        for name, values in found.items():
            if count:
                values.append(times[name] / times["ours"])
    return {name: statistics.quantiles(values, n=4) for name, values in found.items()}


def extra_memory(program: str) -> float:
    """MiB that the linear loss takes beyond its inputs and gradients, in a process of its own."""
    command = [sys.executable, "-m", "bench.peak_memory", program, str(TOKENS)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def table(stored: dict[str, Any]) -> str:
    rows = []
    for threads, run in sorted(stored.items()):
        for work, peers in run["work"].items():
            for name, (low, median, high) in peers.items():
                extra = run["extra MiB"].get(name) if work.startswith("linear") else None
                spread = f"{median:.2f} [{low:.2f}, {high:.2f}]"
                rows.append([work, name, threads, spread, "" if extra is None else f"{extra:.0f}"])
    (device,) = {run["device"] for run in stored.values()}
    own = max(run["extra MiB"]["ours"] for run in stored.values())
    header = ["work", "beside ours", "threads", "its time / ours [quartiles]", "its extra MiB"]
    text = markdown_table(header, rows)
    return f"{device}; the linear loss takes {own:.0f} MiB of extra memory:\n\n{text}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_ratios", description=__doc__)
    parser.add_argument("--rounds", type=int, default=tiny(9, 2))
    rounds = parser.parse_args(arguments).rounds
    threads = torch.get_num_threads()
    work = {
        f"linear, {TOKENS} tokens, H={HEAD.hidden}, V={HEAD.vocab}": ratios(
            linear_programs(), rounds
        ),
        f"given logits, {N} tokens, V={V}": ratios(logits_programs(), 3 * rounds),
    }
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored[str(threads)] = {
        **origin(),
        "device": device_name("cpu").replace(f" {threads} threads", ""),
        "torch": torch.__version__,
        "rounds": rounds,
        "work": work,
        "extra MiB": {name: extra_memory(name) for name in ("ours", TORCH)},
    }
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    print(table(stored))
    if tiny(True, False):
        fill(BENCHMARKS, "cpu ratios", table(stored))


if __name__ == "__main__":
    main()
