"""Builds the CUDA library of `csrc/cuda` with nvcc: `python -m gac_kernels.build_cuda`.

By default the library is built for the GPUs of this machine or, if it has none, for all supported
GPUs; `--arch 90a` builds for a GPU in another machine. The library has a plain C interface and its
own copy of the CUDA runtime, so it needs no torch headers and works with every torch version. Its
file name contains a hash of its sources and flags and the CUDA major version: changed sources are
rebuilt, and neither a stale library nor one that is newer than the driver is loaded. nvcc may come
from the CUDA toolkit or from pip; one of the same major version as torch's CUDA is preferred:

    python -m pip install "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*"
    python -m pip install "nvidia-nvvm==13.0.*" "nvidia-cuda-runtime==13.0.*"
    python -m pip install "nvidia-cuda-cccl==13.0.*"
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
# next to the package in a checkout, inside it when installed from a wheel
SOURCES = next((p for p in (PACKAGE / "csrc", PACKAGE.parent / "csrc") if p.is_dir()), PACKAGE)
# by compute capability: Hopper and Blackwell; clusters and bulk copies need 9.0
ARCHITECTURES = {(9, 0): "90a", (10, 0): "100"}
FLAGS = ("-std=c++20", "-O3", "--compiler-options", "-fPIC")
NO_COMPILER = 77  # exit code without nvcc


class NoCompilerError(RuntimeError):
    """Raised if nvcc is not found."""


def find_nvcc() -> str | None:
    """Find nvcc in CUDA_HOME, on the PATH, in /usr/local/cuda or among pip's packages.

    The first one with the major version of torch's CUDA, otherwise the first one.
    """
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        candidates += map(str, sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True))
    found = [nvcc for nvcc in map(shutil.which, candidates) if nvcc]
    if torch.version.cuda:
        major = int(torch.version.cuda.partition(".")[0])
        found.sort(key=lambda nvcc: release(nvcc)[0] != major)
    return next(iter(found), None)


def release(nvcc: str) -> tuple[int, int]:
    """The release of nvcc, such as (13, 0); (0, 0) if it names none."""
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def driver_major() -> int | None:
    """Major version of the newest CUDA that the driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))  # 12080 for CUDA 12.8
    return version.value // 1000


def error_of(load: Callable[[], object]) -> str | None:
    """Why a library does not load, or None."""
    try:
        load()
    except (RuntimeError, OSError) as error:
        return str(error)
    return None


def architectures() -> tuple[str, ...]:
    """Architectures of the supported GPUs present; without a GPU, all supported architectures."""
    if not torch.cuda.is_available() or torch.version.hip:
        return tuple(ARCHITECTURES.values())
    present = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return tuple(sorted({ARCHITECTURES[x] for x in present if x in ARCHITECTURES}))


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(
        [*SOURCES.glob("*.h"), *SOURCES.glob("cuda/*.h"), *SOURCES.glob("cuda/*.cu")]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def find_library(targets: Sequence[str] | None = None) -> Path | None:
    """A library of the current sources for these architectures and this driver, if one was built.

    targets: architectures; default: `architectures()`. A library built for additional ones is used
    too.
    """
    wanted, driver = set(architectures() if targets is None else targets), driver_major()
    for folder in (PACKAGE, _cache()):
        for path in sorted(folder.glob(f"_cuda-{_digest()}-cu*-*.so")):
            _, _, cuda, *built = path.stem.split("-")
            if wanted <= {*built} and (driver is None or int(cuda.removeprefix("cu")) <= driver):
                return path
    return None


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gac"


def compile_source(*options: str) -> str:
    """Run nvcc on launch.cu and return its output. Raises RuntimeError if it fails."""
    nvcc, source = _nvcc(), SOURCES / "cuda" / "launch.cu"
    # a CUDA runtime from pip is in lib instead of lib64
    folder = Path(nvcc).resolve().parents[1] / "lib"
    library = [f"-L{folder}"] if (folder / "libcudart_static.a").exists() else []
    command = [nvcc, *FLAGS, *library, *options, str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return result.stdout + result.stderr


def _nvcc() -> str:
    """The compiler. Raises RuntimeError if there is none or the driver is too old for it."""
    nvcc, driver = find_nvcc(), driver_major()
    if nvcc is None:
        raise NoCompilerError("nvcc was not found: put it on the PATH or set CUDA_HOME")
    if driver is not None and release(nvcc)[0] > driver:
        raise RuntimeError(
            f"{nvcc} builds for CUDA {release(nvcc)[0]}, but the driver supports CUDA {driver}: "
            f"set CUDA_HOME to CUDA {driver}, or update the driver"
        )
    return nvcc


def build(targets: Sequence[str] | None = None) -> Path:
    """Path of the library, compiled first if necessary. Raises RuntimeError if the build fails.

    targets: architectures such as "90a"; default: `architectures()`.
    """
    wanted = architectures() if targets is None else targets
    if not wanted:
        raise RuntimeError("csrc/cuda does not support these GPUs: --arch builds for others")
    if path := find_library(wanted):
        return path
    name = f"_cuda-{_digest()}-cu{release(_nvcc())[0]}-{'-'.join(wanted)}.so"
    # the cache if the package directory is not writable
    path = (PACKAGE if os.access(PACKAGE, os.W_OK) else _cache()) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # with this suffix, git ignores the folder if it is left behind by a killed process
    with tempfile.TemporaryDirectory(dir=path.parent, suffix=".so") as folder:
        built = Path(folder) / path.name
        options = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted]
        compile_source(*options, "--threads", "0", "-shared", "-o", str(built))
        built.replace(path)  # atomic: another process may be building it too
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gac_kernels.build_cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES.values())
    try:
        print(build(parser.parse_args(arguments).arch))
    except NoCompilerError as error:
        print(f"skipped: {error}")
        sys.exit(NO_COMPILER)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
