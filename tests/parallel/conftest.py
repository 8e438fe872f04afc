"""Several layers: FSDP gathers and frees one after the other."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def task(two_layers: Path) -> Path:
    return two_layers
