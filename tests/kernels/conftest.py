"""The backends of the row functions."""

import ctypes
import functools
import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from gac_kernels import backends, reference
from gac_kernels.backends import cuda
from tests.kernels import cuda_emulation
from tests.kernels.cases import require_backend

SLOW = "triton", "cuda"  # interpreted, or on emulated threads

if importlib.util.find_spec("triton"):
    from triton.runtime import interpreter

    from bench.interpreter import emulate_bfloat16

    @functools.cache
    def _patch_language(function: Any) -> None:
        interpreter._patch_lang(function)

    def _call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a nested function; the interpreter's own patches the language in every call."""
        _patch_language(self.fn)
        return self.rewrite()(*arguments, **keywords)

    interpreter.InterpretedFunction.__call__ = _call
    dtype_of, dtypes = interpreter._get_np_dtype, {}

    def _dtype(type_: Any) -> Any:
        if type_.name not in dtypes:
            dtypes[type_.name] = dtype_of(type_)
        return dtypes[type_.name]

    interpreter._get_np_dtype = _dtype
    # the interpreter computes the checks of integer overflow, but only reads them if it debugs
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    emulate_bfloat16()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of a test marked `sampled`, the slow backends run every fifth case, and all with `full`."""
    counts: Counter[object] = Counter()
    for item in items:
        if item.get_closest_marker("sampled") and item.callspec.params["backend"] in SLOW:
            key = item.function, item.callspec.params["backend"]
            if counts[key] % 5:
                item.add_marker(pytest.mark.full(reason="the fast backends run every case"))
            counts[key] += 1


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink Triton's tiles, so that a hundred vocabulary entries span two, as real ones do."""
    launch = pytest.importorskip("gac_kernels.backends.triton.launch")
    tile, usual = launch.Tiling(lanes=16, width=4, warps=1, stages=3), launch.tiling

    def tiling(logits: Tensor, out: Tensor | None = None) -> Any:
        return tile if logits.shape[-1] < 1000 else usual(logits, out)

    monkeypatch.setattr(launch, "tiling", tiling)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that runs here: Triton's with small tiles, CUDA's on emulated threads."""
    if request.param == "triton":
        request.getfixturevalue("small_tiles")
    if request.param == "cuda":
        return request.getfixturevalue("emulated_cuda")
    return require_backend(request.param)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Run `backends.cuda` on CPU tensors, with a fixed thread order."""
    loaded = cuda_emulation.library()
    monkeypatch.setattr(cuda, "library", lambda: loaded)
    cuda_emulation.reset(loaded)
    return loaded


@pytest.fixture
def split_rows(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Force the split of a row; small rows would otherwise always get a cluster of one block."""

    def force(cluster: int, slots: int) -> None:
        monkeypatch.setattr(cuda, "split", lambda *_, **__: cuda.Split(cluster, slots))

    return force


@pytest.fixture
def emulated_cuda(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make "native" the CUDA kernels, on CPU tensors; wide rows are split over two blocks."""
    load = backends.load
    changes = {
        "split": lambda vocab, *_, **__: cuda.Split(1 + (vocab > 1000), 3),
        "unavailable": lambda *_: None,
        "_batch_backend": lambda _: reference,  # the work per batch is Triton's
    }
    for name, function in changes.items():
        monkeypatch.setattr(cuda, name, function)
    monkeypatch.setattr(backends, "load", lambda n, d: cuda if n == "native" else load(n, d))
    return "native"
