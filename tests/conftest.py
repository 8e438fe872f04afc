"""Fixtures and hooks for all tests."""

import faulthandler
import gc
import logging
import os
import random
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import Phase, settings

# Triton decides at import whether kernels are interpreted, so this precedes every triton import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# In memory: a checkpoint waits until its files are on the disk.
if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 8 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# The same examples in every run. A failing example is not made smaller, which takes minutes; the
# deadline is that of the test.
settings.register_profile(
    "gac", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("gac")
DEADLINE = pytest.StashKey[float]()
gc.disable()  # until all tests are collected: imports create no garbage to speak of


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark in ("full", "real"):  # minutes, a download: only with `-m full` or `-m real`
        if mark not in config.option.markexpr:
            config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker(mark)])
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # first, so that all workers end together
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ("slow", "full", "skip", "skipif", "xfail"):
                assert mark.kwargs.get("reason"), f"{item.nodeid}: {mark.name} without a reason"
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Set the deadline of a test: longer if it is slow, or while the machine is overloaded."""
    slow = any(map(item.get_closest_marker, ("slow", "full", "real")))
    several = item.get_closest_marker("dist") and "results" in item.fixturenames
    deadline = 600 if slow else 120 if several else 30
    item.stash[DEADLINE] = deadline * max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
    item.add_marker(pytest.mark.timeout(item.stash[DEADLINE]))
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the process if the signal of the deadline is not handled, as in C code without an end."""
    faulthandler.dump_traceback_later(1.2 * item.stash[DEADLINE], exit=True, file=sys.__stderr__)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # accelerate collects garbage whenever training starts: skip what imports created
    gc.enable()
    gc.set_threshold(10_000)  # from 700: garbage collection took a twelfth of the time
    # start the server now, so that it is ready when the first test needs it
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].start_server()


@pytest.fixture(autouse=True)
def start() -> None:
    """Seed all RNGs and show no details in logs, so that tests do not depend on earlier ones."""
    logging.getLogger("gac").setLevel(logging.NOTSET)
    random.seed(0)
    numpy.random.seed(0)
    # `torch.manual_seed` also formats the stack for each type of device, half of a test's start
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny model, tokenizer and dataset. Tests must not modify it."""
    from tests.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `task`, for tests that need several layers, or rollouts with different rewards."""
    from tests.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialized memory with nan or the dtype's minimum, so that reading it is noticed."""

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            if tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
                return tensor.fill_(torch.iinfo(tensor.dtype).min)
        return tensor

    functions = [(torch, name) for name in ("empty", "empty_like", "empty_strided")]
    for owner, name in [*functions, (torch.Tensor, "new_empty")]:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _real=real, **k: poisoned(_real(*a, **k)))


@pytest.fixture
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures, but write no image, which takes most of the time of a report."""
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda _, file, **__: (
            file.write_bytes(b"<svg/>") if isinstance(file, Path) else file.write(b"<svg/>")
        ),
    )


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Directory of the real datasets, from GAC_DATA; skips the test if it does not exist."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("GAC_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no datasets at {path}; set GAC_DATA to their directory")
    return path


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of a small pretrained model, downloaded unless it is in the cache."""
    from gac.demo.real_model import fetch_model
    from gac.errors import MissingExtra, RunError

    try:
        return fetch_model()
    except (MissingExtra, RunError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cached_model() -> Path:
    """The folder of the same model; the test is skipped where nobody has downloaded it."""
    from gac.demo.real_model import cached_model

    folder = cached_model()
    if folder is None:
        pytest.skip("the pretrained model is not in the cache: make test-real downloads it")
    return folder
