"""Settings and fixtures of all benchmarks: memory stays mapped, idle threads do not spin."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .settings import DRY_RUN

if TYPE_CHECKING:
    from .record import Record

# libgomp reads this when it loads, so it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

WRITTEN: dict[Path, None] = {}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # after the environment is set

    for item in items if not DRY_RUN else ():
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def mapped_memory() -> bool:
    """Reuse large buffers instead of unmapping them and faulting them in again at every call.

    The page faults of a fresh [N, V] buffer take longer than the loss itself and would favor the
    provider that allocates least. False if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)])


@pytest.fixture
def record() -> Iterator[Record]:
    """Rows for bench/results, saved after each benchmark so that a timeout loses only one row."""
    from .record import Record

    rows = Record()
    yield rows
    WRITTEN.update(dict.fromkeys(rows.save()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables of the new results, even if output is captured."""
    from .table import tables

    for path in WRITTEN:
        terminalreporter.write_line(f"\nwrote {path}\n\n{tables(path)}")
