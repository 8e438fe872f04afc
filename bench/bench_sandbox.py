"""Benchmark of the sandbox: programs per second, latency of one program, and start-up time.

On a shared machine, wall-clock time includes waiting for a core. CPU time is therefore measured
too; it gives the throughput of two idle cores.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from bench.record import RESULTS, device_name, slug
from gac.sandbox.pool import JudgeSpec, Pool, Program, RunResult
from tools.origin import commit

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

PROGRAM, SUITE = (
    Program("def f(x): return 2 * x"),
    JudgeSpec(("assert f(2) == 4", "assert f(3) == 6")),
)
SCRIPT = Program("print(2 * int(input()))")
PROGRAMS, ROUNDS, WORKERS = 100, 5, 2
TARGET = 50  # trivial programs a second on two cores


def check(pool: Pool) -> RunResult:
    return pool.check(PROGRAM, SUITE, 5, 512)


def run(pool: Pool) -> RunResult:
    return pool.run(SCRIPT, b"21\n", 5, 512, 100)


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.mark.parametrize("work", [check, run], ids=["tests", "script"])
@pytest.mark.parametrize("preload", [(), ("numpy",)], ids=["stdlib", "numpy"])
def test_sandbox(benchmark, work: Callable[[Pool], RunResult], preload: tuple[str, ...]) -> None:
    before = cpu_seconds()
    start = time.perf_counter()
    pool = Pool(workers=WORKERS, preload=preload)
    layers = pool.start()
    started = time.perf_counter() - start
    pool.close()  # waits for the server, so that its CPU time is included
    startup = cpu_seconds() - before

    first = work(pool)
    assert first.passed == (True, True) or first.stdout == b"42\n", first
    latencies = []
    for _ in range(50):
        start = time.perf_counter()
        work(pool)
        latencies.append(1e3 * (time.perf_counter() - start))
    pool.close()

    before = cpu_seconds()
    pool.start()
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        pool.map(work, [pool] * PROGRAMS)
        rates.append(PROGRAMS / (time.perf_counter() - start))
    pool.close()
    cpu_ms = 1e3 * (cpu_seconds() - before - startup) / (ROUNDS * PROGRAMS)

    figures = {
        "programs_per_second": statistics.median(rates),
        "slowest_round": min(rates),
        "fastest_round": max(rates),
        "cpu_ms": cpu_ms,
        "two_idle_cores_per_second": 2e3 / cpu_ms,
        "median_ms": statistics.median(latencies),
        "p95_ms": sorted(latencies)[47],
        "start_seconds": started,
        "load": os.getloadavg()[0],
    }
    name = f"{work.__name__}, {', '.join(preload) or 'stdlib'}"
    save(name, {"layers": str(layers), **figures})
    print(f"\n{name}: {layers}")
    print(", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    benchmark.extra_info |= figures
    benchmark.pedantic(work, (pool,), rounds=5, warmup_rounds=1)
    pool.close()
    assert figures["two_idle_cores_per_second"] >= TARGET


def save(name: str, figures: dict[str, Any]) -> None:
    """Save the figures under `name` in bench/results/sandbox/<device>-<date>.json."""
    device, today = device_name("cpu"), str(datetime.date.today())
    path = RESULTS / "sandbox" / f"{slug(device)}-{today}.json"
    head = {
        "device": device,
        "date": today,
        "commit": commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "workers": WORKERS,
        "target": TARGET,
    }
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "rows": {**rows, name: figures}}, indent=1) + "\n")
