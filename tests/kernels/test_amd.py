"""AMD support, without a GPU: Triton kernels compile, and a ROCm build of PyTorch is recognized."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from gac_kernels import backends, build_cuda, projection
from gac_kernels.backends import cuda, triton
from gac_kernels.backends.triton import launch

CUDA = torch.device("cuda")


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build of PyTorch that calls an AMD gfx90a "cuda", with capability 9.0 like a Hopper."""
    properties = SimpleNamespace(warp_size=64)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "AMD Instinct")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(triton, "InterpretedFunction", type(None))  # kernels would be compiled
    launch.warp_size.cache_clear()
    yield
    launch.warp_size.cache_clear()


def test_rocm_is_not_mistaken_for_hopper(rocm: None) -> None:
    assert "thread-block clusters" in cuda.unavailable(CUDA, torch.bfloat16)
    assert triton.unavailable(CUDA, torch.bfloat16) is None
    assert backends.select_backend("auto", CUDA, torch.bfloat16) is triton
    with pytest.raises(RuntimeError, match="backend='native' cannot run here: .*AMD"):
        backends.select_backend("native", CUDA, torch.bfloat16)
    assert build_cuda.architectures() == ("90a", "100"), "no device to build for"


def test_a_row_has_as_many_threads_in_warps_of_64(
    rocm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    kernel = {(3,): lambda **options: started.append(options)}
    monkeypatch.setattr(torch.cuda, "device", lambda *_: pytest.MonkeyPatch.context())
    launch.Launch(kernel, 3, {"x": 1}, 16).run(CUDA)
    assert started == [{"x": 1, "num_warps": 8, "enable_fp_fusion": True}]
    assert [launch.launch_warps(n, 64) for n in (1, 4)] == [1, 2]
    assert launch.warp_size(torch.device("cpu")) == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemms_without_float32_output_get_float32_operands(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for a device without such GEMMs."""
    assert not projection.has_float32_output("cpu", dtype)
    monkeypatch.setattr(projection, "has_float32_output", lambda *_: False)
    assert projection.operand_dtype(CUDA, dtype) == torch.float32
    monkeypatch.setattr(projection, "has_float32_output", lambda *_: True)
    assert projection.operand_dtype(CUDA, dtype) == dtype
    assert projection.operand_dtype(torch.device("cpu"), dtype) == torch.float32


@pytest.mark.parametrize(
    ("version", "numpy", "works"),
    [("3.6.0", "2.4.1", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.4.0", True)],
)
def test_versions_of_the_interpreter(version: str, numpy: str, works: bool, monkeypatch) -> None:
    monkeypatch.setattr(triton, "version", {"triton": version, "numpy": numpy}.get)
    assert (triton._interpreter_error() is None) == works
