"""Building the CUDA library: for which GPUs, with which compiler, and without one."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch

from bench import settings
from gac_kernels import build_cuda
from gac_kernels.backends import cuda

NVCC = """\
#!/bin/sh
[ "$1" = --version ] && { echo "Cuda compilation tools, release RELEASE, V1"; exit 0; }
echo "$@"
echo warning >&2
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
exit CODE
"""


def write_nvcc(path: Path, release: str, code: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(NVCC.replace("RELEASE", release).replace("CODE", str(code)))
    path.chmod(0o755)


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc in CUDA_HOME that writes an empty library, and one on the PATH that fails."""
    monkeypatch.setattr(build_cuda, "PACKAGE", tmp_path / "package")
    write_nvcc(tmp_path / "cuda" / "bin" / "nvcc", "13.0")
    write_nvcc(tmp_path / "path" / "nvcc", "13.0", code=3)
    (tmp_path / "package").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_library_is_built_for_the_gpus_that_are_present(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library for more architectures, or one built before, is used as it is."""
    assert build_cuda.architectures() == ("90a", "100"), "without a GPU: all"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    capabilities = [(9, 0), (8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert build_cuda.architectures() == ("90a",)
    with monkeypatch.context() as older, pytest.raises(SystemExit, match="not support these GPUs"):
        older.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        build_cuda.main([])
    options: list[str] = []

    def compile_source(*arguments: str) -> str:
        options[:] = arguments
        assert Path(arguments[-1]).parent.suffix == ".so", "git would not ignore the folder"
        Path(arguments[-1]).write_text("")
        return ""

    monkeypatch.setattr(build_cuda, "compile_source", compile_source)
    path = build_cuda.build()
    assert path.name.endswith("-90a.so")
    assert sum("-gencode" in o for o in options) == 1
    assert [p.name for p in (fake_nvcc / "package").iterdir()] == [path.name]
    options.clear()
    assert build_cuda.build() == path
    assert not options
    assert build_cuda.build(("100", "90a")).name.endswith("-100-90a.so")
    library = build_cuda.find_library(("100",))
    assert library is not None
    assert library.name.endswith("-100-90a.so")


def test_nvcc_has_the_cuda_version_of_torch(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the compilers in pip's packages and elsewhere; without such a version, the first one."""
    packages = {major: fake_nvcc / "nvidia" / f"cu{major}" / "bin" / "nvcc" for major in (11, 12)}
    for major, nvcc in packages.items():
        write_nvcc(nvcc, f"{major}.8")
    write_nvcc(fake_nvcc / "nvidia" / "cu10" / "bin" / "nvcc", "12.1")  # after cu12
    monkeypatch.syspath_prepend(fake_nvcc)
    for version, found in (
        ("11.8", packages[11]),
        ("12.4", packages[12]),
        ("13.0", fake_nvcc / "cuda" / "bin" / "nvcc"),
        ("14.0", fake_nvcc / "cuda" / "bin" / "nvcc"),
        (None, fake_nvcc / "cuda" / "bin" / "nvcc"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert build_cuda.find_nvcc() == str(found)


def test_a_driver_older_than_the_compiler_is_an_error_that_names_both(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library contains a CUDA runtime, which older drivers refuse."""
    assert "-cu13-" in build_cuda.build(["90a"]).name
    monkeypatch.setattr(build_cuda, "driver_major", lambda: 12)
    assert build_cuda.find_library(["90a"]) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    cuda.library.cache_clear()
    cuda._library_error.cache_clear()
    reason = cuda.unavailable(torch.device("cuda"), torch.bfloat16)
    assert reason is not None
    assert "builds for CUDA 13, but the driver supports CUDA 12" in reason
    cuda._library_error.cache_clear()
    write_nvcc(fake_nvcc / "cuda" / "bin" / "nvcc", "12.9")
    path = build_cuda.build(["90a"])
    assert "-cu12-" in path.name
    assert build_cuda.find_library(["90a"]) == path


def test_the_version_of_the_driver_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuDriverGetVersion(int *v) { *v = 12080; return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(tmp_path / name)))
    assert build_cuda.driver_major() == 12
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(tmp_path / "none" / name)))
    assert build_cuda.driver_major() is None


def test_a_missing_compiler_is_reported_and_no_error_of_the_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="nvcc was not found: put it on the PATH"):
        build_cuda.compile_source()
    monkeypatch.setattr(build_cuda, "PACKAGE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as error:
        build_cuda.main(["--arch", "90a"])
    assert error.value.code == build_cuda.NO_COMPILER == settings.SKIPPED
    assert capsys.readouterr().out.startswith("skipped: nvcc was not found")


def test_output_and_errors_of_the_compiler(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_cuda.main(["--arch", "90a", "100"])
    (library,) = (fake_nvcc / "package").iterdir()
    assert capsys.readouterr().out == f"{library}\n"
    assert library.name.endswith("-90a-100.so")
    runtime = fake_nvcc / "cuda" / "lib" / "libcudart_static.a"
    for options in ([], [f"-L{runtime.parent}"]):
        output = build_cuda.compile_source("-x", "y")
        source = build_cuda.SOURCES / "cuda" / "launch.cu"
        expected = [*build_cuda.FLAGS, *options, "-x", "y", str(source)]
        assert output == f"{' '.join(expected)}\nwarning\n"
        runtime.parent.mkdir(exist_ok=True)
        runtime.write_text("")
    with pytest.raises(SystemExit, match="2"):
        build_cuda.main(["--arch", "80"])
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
    assert len({*paths}) == 3
    assert paths[3] == paths[2]
    assert all(p.exists() for p in paths)
    monkeypatch.setattr(build_cuda, "FLAGS", (*build_cuda.FLAGS, "-g"))
    build_cuda._digest.cache_clear()
    assert build_cuda.find_library(["90a"]) is None
    package, access = build_cuda.PACKAGE, os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != package and access(path, mode))
    path = build_cuda.build(["100"])
    assert path.parent == fake_nvcc / "cache" / "gac"
    assert path.exists()
    assert build_cuda.build(["100"]) == path
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(fake_nvcc))
    assert build_cuda.build(["100"]).parent == fake_nvcc / ".cache" / "gac"
    monkeypatch.undo()
    build_cuda._digest.cache_clear()
