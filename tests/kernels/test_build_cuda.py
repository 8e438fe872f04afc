"""Building the CUDA library: for which GPUs, with which compiler, and without one."""

from __future__ import annotations

import os
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


NVCC = """\
#!/bin/sh
echo "$@"
echo warning >&2
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
exit CODE
"""


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc in CUDA_HOME that writes an empty library, and one on the PATH that fails."""
    monkeypatch.setattr(build_cuda, "PACKAGE", tmp_path / "package")
    for folder, code in ((tmp_path / "cuda" / "bin", "0"), (tmp_path / "path", "3")):
        folder.mkdir(parents=True)
        (folder / "nvcc").write_text(NVCC.replace("CODE", code))
        (folder / "nvcc").chmod(0o755)
    (tmp_path / "package").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    return tmp_path


def test_output_and_errors_of_the_compiler(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_cuda.main(["--arch", "90a", "100"])
    (library,) = (fake_nvcc / "package").iterdir()
    assert capsys.readouterr().out == f"{library}\n" and library.name.endswith("-90a-100.so")
    runtime = fake_nvcc / "cuda" / "lib" / "libcudart_static.a"
    for options in ([], [f"-L{runtime.parent}"]):
        output = build_cuda.compile_source("-x", "y")
        source = build_cuda.SOURCES / "cuda" / "launch.cu"
        expected = [*build_cuda.FLAGS, *options, "-x", "y", str(source)]
        assert output == f"{' '.join(expected)}\nwarning\n"
        runtime.parent.mkdir(exist_ok=True)
        runtime.write_text("")
    library.unlink()
    monkeypatch.delenv("CUDA_HOME")
    assert build_cuda.find_nvcc() == str(fake_nvcc / "path" / "nvcc")
    with pytest.raises(SystemExit, match=r"path/nvcc .* failed:\nwarning"):
        build_cuda.main(["--arch", "90a"])


def test_another_library_is_built_if_a_source_changes_and_the_cache_is_used_if_need_be(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = fake_nvcc / "csrc"
    (sources / "cuda").mkdir(parents=True)
    monkeypatch.setattr(build_cuda, "SOURCES", sources)
    paths = []
    for name in ("cuda/launch.cu", "math.h", "cuda/rows.h", "cuda/notes.txt"):
        (sources / name).write_text("// text")
        build_cuda._digest.cache_clear()
        paths.append(build_cuda.build(["90a"]))
    assert len({*paths}) == 3 and paths[3] == paths[2] and all(p.exists() for p in paths)
    monkeypatch.setattr(build_cuda, "FLAGS", (*build_cuda.FLAGS, "-g"))
    build_cuda._digest.cache_clear()
    assert build_cuda.library_path(["90a"]) not in paths
    package, access = build_cuda.PACKAGE, os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != package and access(path, mode))
    monkeypatch.setenv("XDG_CACHE_HOME", str(fake_nvcc / "cache"))
    path = build_cuda.build(["100"])
    assert path.parent == fake_nvcc / "cache" / "gac" and path.exists()
    assert build_cuda.build(["100"]) == path
    (sources / "cuda" / "launch.cu").unlink()
    with pytest.raises(RuntimeError, match="launch.cu does not exist: reinstall gac"):
        build_cuda.compile_source()
    monkeypatch.undo()
    build_cuda._digest.cache_clear()
