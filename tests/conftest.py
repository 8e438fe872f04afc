"""Fixtures that every test file shares."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy
import pytest
import torch

# Triton decides at import whether kernels are interpreted, so this precedes every triton import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" not in config.option.markexpr:  # minutes: only when asked for, by `-m full`
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    if "tests.ranks" in sys.modules:  # its server is ready by the time a test asks for it
        sys.modules["tests.ranks"].start_server()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, alone or in the suite."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, a tokenizer and data for a run of milliseconds; nobody changes it."""
    from .tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds nan (floats) or the type's minimum: reading it shows."""

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            if tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
                return tensor.fill_(torch.iinfo(tensor.dtype).min)
        return tensor

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _real=real, **k: poisoned(_real(*a, **k)))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of the real data sets, from GAC_DATA; skips the test when it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("GAC_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no real data at {path}: set GAC_DATA to its directory")
    return path
