"""Building the CUDA library: for which GPUs, with which compiler, and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import settings
from gac_kernels import build_cuda


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="nvcc was not found: put it on the PATH"):
        build_cuda.compile_source()


def test_the_library_is_built_for_the_gpus_that_are_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library for more architectures, or one built before, is used as it is."""
    monkeypatch.setattr(build_cuda, "PACKAGE", tmp_path)
    assert build_cuda.architectures() == ("90a", "100"), "without a GPU: all"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    capabilities = [(9, 0), (8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert build_cuda.architectures() == ("90a",)
    options: list[str] = []

    def compile_source(*arguments: str) -> str:
        options[:] = arguments
        Path(arguments[-1]).write_text("")
        return ""

    monkeypatch.setattr(build_cuda, "compile_source", compile_source)
    path = build_cuda.build()
    assert path.name.endswith("-90a.so") and sum("-gencode" in o for o in options) == 1
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    options.clear()
    assert build_cuda.build() == path and not options
    assert build_cuda.build(("100", "90a")).name.endswith("-100-90a.so")
    assert build_cuda.library_path(("100",)).name.endswith("-100-90a.so")


def test_nvcc_of_pip_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("cu12", "cu13"):
        nvcc = tmp_path / "nvidia" / version / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("")
        nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "missing"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.syspath_prepend(tmp_path)
    found = build_cuda.find_nvcc()
    assert found == str(nvcc) or Path("/usr/local/cuda/bin/nvcc").exists()


def test_a_missing_compiler_is_no_error_of_the_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: None)
    monkeypatch.setattr(build_cuda, "PACKAGE", tmp_path)
    with pytest.raises(SystemExit) as error:
        build_cuda.main(["--arch", "90a"])
    assert error.value.code == build_cuda.NO_COMPILER == settings.SKIPPED
    assert capsys.readouterr().out.startswith("skipped: nvcc was not found")
