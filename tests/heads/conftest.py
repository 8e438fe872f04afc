"""Fixtures for the heads: TRL's head on CPUs, and modules of trainers that are not installed."""

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

SOURCES = Path(os.environ.get("GAC_TRAINER_SOURCES", "missing"))
ABSENT = {
    "prime-rl": ("prime_rl.utils.logger", "prime_rl.utils.vlm"),
    "OpenRLHF": (
        "deepspeed",
        "openrlhf.models.ring_attn_utils",
        "transformers.integrations.deepspeed",
    ),
}
"""Modules that a trainer's code imports and these tests do not need."""


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module from a checkout without running the packages' `__init__`."""

    def load(root: Path, name: str, absent: tuple[str, ...]) -> Any:
        if not root.is_dir():
            pytest.skip(f"no {root}: set GAC_TRAINER_SOURCES")
        for package in absent:
            try:
                importlib.import_module(package)
            except ImportError:
                monkeypatch.setitem(sys.modules, package, MagicMock(__spec__=None))
        parts = name.split(".")[:-1]
        for i in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:i]))
            package.__path__ = [str(root.joinpath(*parts[:i]))]
            monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


@pytest.fixture(autouse=True, scope="session")
def trl_head_on_cpus() -> Iterator[None]:
    """The head of TRL 1.15 needs a GPU: use ours in its place."""
    try:
        needs_gpu = version("trl").startswith("1.15.")
    except PackageNotFoundError:
        needs_gpu = False
    if not needs_gpu:
        yield
        return
    from gac_kernels.heads.trl import apply_fused_head

    with apply_fused_head():
        yield
