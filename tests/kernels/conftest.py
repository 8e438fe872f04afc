"""The backends of the row functions."""

from __future__ import annotations

import pytest

from tests.kernels.cases import require_backend


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink Triton's tiles, so that a hundred vocabulary entries span two, as real ones do."""
    launch = pytest.importorskip("gac_kernels.backends.triton.launch")
    tile, usual = launch.Tiling(lanes=16, width=4, warps=1, stages=3), launch.tiling
    monkeypatch.setattr(launch, "tiling", lambda v, dtype: tile if v < 1000 else usual(v, dtype))


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend that runs here; Triton's with small tiles."""
    if request.param == "triton":
        request.getfixturevalue("small_tiles")
    return require_backend(request.param)
