"""Builds the CUDA library of `csrc/cuda` with nvcc: `python -m gac_kernels.build_cuda`.

The library has a plain C interface, so it needs no torch headers and works with every torch
version. Its file name contains a hash of its sources and flags: changed sources are rebuilt, and a
stale library is never loaded.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parent
# next to the package in a checkout, inside it when installed from a wheel
SOURCES = next((p for p in (PACKAGE / "csrc", PACKAGE.parent / "csrc") if p.is_dir()), PACKAGE)
# Hopper and Blackwell: clusters and bulk copies need compute capability 9.0
ARCHITECTURES = ("90a", "100")
FLAGS = ("-std=c++20", "-O3", "--compiler-options", "-fPIC")


def find_nvcc() -> str | None:
    """Find nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    return shutil.which(candidates[0]) or shutil.which("nvcc") or shutil.which(candidates[-1])


@functools.cache
def library_path() -> Path:
    """Path of the library for the current sources, built or not."""
    digest = hashlib.sha256(repr((ARCHITECTURES, FLAGS)).encode())
    for path in sorted(
        [*SOURCES.glob("*.h"), *SOURCES.glob("cuda/*.h"), *SOURCES.glob("cuda/*.cu")]
    ):
        digest.update(path.read_bytes())
    name = f"_cuda-{digest.hexdigest()[:12]}.so"
    if os.access(PACKAGE, os.W_OK) or (PACKAGE / name).exists():
        return PACKAGE / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "gac" / name  # the package directory is not writable


def compile_source(*options: str) -> str:
    """Run nvcc on launch.cu and return its output. Raises RuntimeError if it fails."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found: put it on the PATH or set CUDA_HOME")
    source = SOURCES / "cuda" / "launch.cu"
    if not source.exists():
        raise RuntimeError(f"{source} does not exist: reinstall gac")
    command = [nvcc, *FLAGS, *options, str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return result.stdout + result.stderr


def build() -> Path:
    """Path of the library, compiled first if necessary. Raises RuntimeError if the build fails."""
    path = library_path()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
        compile_source(*targets, "-shared", "-o", str(built))
        built.replace(path)  # atomic: another process may be building it too
    return path


if __name__ == "__main__":
    try:
        print(build())
    except RuntimeError as error:
        sys.exit(str(error))
