"""Builds the native library and ships its sources; everything else is in pyproject.toml.

GAC_EXT=auto (default) builds it if a C++ compiler is found and prints a message if that fails; 1
makes a failed build an error; 0 skips it. Without it, the other backends are used. The library
needs neither torch nor Python (see csrc/cpu/native.h), so one binary works with every version.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

MODE = os.environ.get("GAC_EXT", "auto")
if MODE not in ("auto", "0", "1"):
    raise SystemExit(f"GAC_EXT={MODE!r}: use auto, 0 or 1")

X86 = platform.machine() in ("x86_64", "AMD64")
# The row kernels are compiled once per instruction set.
SOURCES = {
    "backend": [],
    "batch": [],
    "dispatch": [],
    "rows_default": [],
}
if X86:
    SOURCES |= {
        "rows_avx2": ["-mavx2", "-mfma", "-mf16c"],
        # gcc 12 warns about its own header
        "rows_avx512": ["-mavx512f", "-mfma", "-Wno-maybe-uninitialized", "-Wno-uninitialized"],
    }
# No -ffast-math: at link time it would enable flush-to-zero for the whole process. No -fopenmp at
# link time: the library uses the OpenMP runtime that torch has loaded.
# -fwrapv: with gcc 12, the gradient's pass takes about 10 % longer without it (measured).
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=fast", "-fwrapv", "-fvisibility=hidden", "-fPIC"]
FLAGS += ["-fopenmp"]
HEADERS = Path("csrc/cpu/native.h"), Path("csrc/token_math.h")
INTERFACE = hashlib.sha256(b"".join(x.read_bytes() for x in HEADERS)).hexdigest()


class BuildNative(build_ext):
    """Builds the shared library; an object is compiled only if its source or a header changed."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # loaded with ctypes, never imported

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # setuptools and compilers raise many; PyTorch is the fallback
            if MODE == "1":
                raise
            print(
                f"gac-kernels: the native CPU kernels were not built ({error}); "
                "set GAC_EXT=1 to make this an error"
            )

    def build_extension(self, ext: Extension) -> None:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        if shutil.which(compiler[0]) is None:
            raise RuntimeError(f"C++ compiler {compiler[0]!r} was not found: install it or set CXX")
        # not build_temp, which is a new folder in every editable install
        objects = Path("build") / f"native-{platform.machine()}"
        objects.mkdir(parents=True, exist_ok=True)
        headers = max(path.stat().st_mtime for path in Path("csrc").rglob("*.h"))

        def compile_source(name: str) -> str:
            source, output = Path(f"csrc/cpu/{name}.cpp"), objects / f"{name}.o"
            newest = max(headers, source.stat().st_mtime, Path("setup.py").stat().st_mtime)
            if not output.exists() or output.stat().st_mtime <= newest:
                flags = [*FLAGS, *SOURCES[name], f'-DGAC_INTERFACE="{INTERFACE}"']
                subprocess.run(
                    [*compiler, *flags, "-c", str(source), "-o", str(output)], check=True
                )
            return str(output)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(compile_source, SOURCES))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(".new")
        subprocess.run([*compiler, "-shared", *compiled, "-o", str(new)], check=True)
        new.replace(library)  # a running process keeps the library that it has loaded


class BuildPython(build_py):
    """Copies the modules and csrc, from which the CUDA kernels are built on first use."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout has csrc next to the package
            target = Path(self.build_lib) / "gac_kernels" / "csrc"
            shutil.copytree("csrc", target, dirs_exist_ok=True)


class Wheel(bdist_wheel):
    """Builds a wheel for any Python 3, as the library is not an extension module."""

    def get_tag(self) -> tuple[str, str, str]:
        build = Path(self.get_finalized_command("build").build_lib)
        native = (build / "gac_kernels" / "_native.so").exists()
        return "py3", "none", super().get_tag()[2] if native else "any"


NATIVE = Extension("gac_kernels._native", [f"csrc/cpu/{name}.cpp" for name in SOURCES])
setup(
    ext_modules=[] if MODE == "0" else [NATIVE],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": Wheel},
)
