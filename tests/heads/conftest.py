from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest


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
