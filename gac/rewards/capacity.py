"""How many worker processes fit on this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gac.errors import is_count, require


def default_workers() -> int:
    """The available cores, divided by the ranks on this machine."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // _ranks())


def workers_that_fit(workers: int | None, memory_mb: int) -> int:
    """`workers` or its default, or fewer if together they could fill half of the memory.

    Args:
        workers: number of workers; None: `default_workers()`.
        memory_mb: what each may use, in MiB. One worker always fits.
    """
    require(workers is None or is_count(workers, 1), "workers", workers, "an integer >= 1")
    available = _memory_bytes() // 2 // _ranks()
    return max(1, min(workers or default_workers(), available // (memory_mb << 20)))


def _ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _memory_bytes() -> int:
    """Memory of this machine or container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        with contextlib.suppress(OSError, ValueError):  # not in a cgroup, or "max"
            sizes.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(sizes)
