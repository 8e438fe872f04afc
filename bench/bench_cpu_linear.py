"""Benchmark of the linear loss on the CPU in float32: our loss, its GEMMs alone, and peers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from .batches import Head, linear_batch
from .linear_losses import cross_entropy_truth, errors, providers, step, truth
from .record import Record
from .timing import gemm_step, interleave

CPU = torch.device("cpu")
N, HEAD = 2048, Head(512, 32000)
SHAPE = f"H={HEAD.hidden} V={HEAD.vocab} float32"
SECONDS = 40  # in total, over all rounds
GEMM_TARGET = 1.12


def test_cpu_linear(benchmark, record: Record) -> None:
    runnable_peers, missing = providers(CPU, compiled=True)
    small = linear_batch(512, HEAD, torch.float32, CPU)
    for name, provider in runnable_peers.items():  # check correctness first; this also compiles
        exact = cross_entropy_truth if provider.scalar else truth
        worst = max(errors(provider.loss, exact, small))
        assert worst < 2e-5, f"{name} is wrong: relative error {worst:.1e}"

    batch = linear_batch(N, HEAD, torch.float32, CPU)
    steps = {"three GEMMs": gemm_step(batch.hidden, batch.weight)}
    steps |= {name: lambda loss=p.loss: step(loss, batch) for name, p in runnable_peers.items()}
    timings = interleave(steps, CPU, SECONDS, min_rounds=3)
    best = timings["ours"].best
    print(f"\n{N} tokens, {SHAPE}, {torch.get_num_threads()} threads")
    for name, timing in timings.items():
        kind = "scalar only" if name in runnable_peers and runnable_peers[name].scalar else ""
        print(f"{name:40} {timing.best:8.0f} ms   time / ours {timing.best / best:5.2f}  {kind}")
        record.add(
            device="cpu",
            work="linear",
            shape=SHAPE,
            tokens=N,
            case="all live",
            provider=name,
            ms=timing.best,
            median_ms=timing.median,
            rounds=timing.rounds,
            scalar=bool(kind),
            tflops=6e-9 * N * HEAD.hidden * HEAD.vocab / timing.best,
        )
    for name, reason in missing.items():
        print(f"{name:40} not run: {reason}")
    print(f"ours / three GEMMs: {best / timings['three GEMMs'].best:.3f}, target {GEMM_TARGET}")
    benchmark.extra_info |= {name: timing._asdict() for name, timing in timings.items()}
    benchmark.extra_info["not run"] = missing
    benchmark.pedantic(steps["ours"], rounds=2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_memory(record: Record) -> None:
    """Measure peak memory beyond the inputs and their gradients, each case in a new process."""
    peaks = {}
    for name, tokens in (("ours", N), ("ours", 4 * N), ("eager", N)):
        command = [sys.executable, "-m", "bench.peak_memory", name, str(tokens)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[name, tokens] = float(result.stdout)
        print(f"{name:8} {tokens:6} tokens: {peaks[name, tokens]:7.0f} MiB above the gradients")
        record.add(
            device="cpu",
            work="linear memory",
            shape=SHAPE,
            tokens=tokens,
            case="all live",
            provider=name,
            mib=peaks[name, tokens],
        )
    few, many = peaks["ours", N], peaks["ours", 4 * N]
    assert many < few + 64, (
        f"memory grows with the number of tokens: {few:.0f} MiB, then {many:.0f} MiB"
    )
