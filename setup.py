"""Builds the native extension and ships its sources; everything else is in pyproject.toml.

GAC_EXT=auto (default) builds it if torch and a compiler are found and prints a message if not; 1
makes a failed build an error; 0 skips it. Without it, the other backends are used.
"""

import os
import platform
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

MODE = os.environ.get("GAC_EXT", "auto")
if MODE not in ("auto", "0", "1"):
    raise SystemExit(f"GAC_EXT={MODE!r}: use auto, 0 or 1")

SOURCES = ["csrc/ops.cpp", *(f"csrc/cpu/{name}.cpp" for name in ("backend", "batch", "dispatch"))]
ROWS = {
    "default": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    # gcc 12 warns about its own header
    "avx512": ["-mavx512f", "-mfma", "-Wno-maybe-uninitialized", "-Wno-uninitialized"],
}
# No -ffast-math: at link time it would enable flush-to-zero for the whole process.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-g0"]


class BuildNative(build_ext):
    """Builds one shared library of operators; row kernels are compiled once per instruction set."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # torch loads it, Python never imports it

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if MODE == "1":
                raise
            print(
                f"gac: the native CPU kernels were not built ({error}); "
                "set GAC_EXT=1 to make this an error"
            )

    def build_extension(self, ext: Extension) -> None:
        from torch.utils import cpp_extension

        x86 = platform.machine() in ("x86_64", "AMD64")
        ext.include_dirs += cpp_extension.include_paths()
        ext.library_dirs += cpp_extension.library_paths()
        for name, flags in ROWS.items():
            if x86 or not flags:
                ext.extra_objects += self.compiler.compile(
                    [f"csrc/cpu/rows_{name}.cpp"], self.build_temp, extra_postargs=FLAGS + flags
                )
        super().build_extension(ext)


class BuildPython(build_py):
    """Copies the modules and csrc, from which the CUDA kernels are built on first use."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout has csrc next to the package
            target = Path(self.build_lib) / "gac_kernels" / "csrc"
            shutil.copytree("csrc", target, dirs_exist_ok=True)


class Wheel(bdist_wheel):
    """Builds one wheel per platform for every Python 3: the library is not an extension module."""

    def get_tag(self) -> tuple[str, str, str]:
        build = Path(self.get_finalized_command("build").build_lib)
        native = (build / "gac_kernels" / "_native.so").exists()
        return "py3", "none", super().get_tag()[2] if native else "any"


NATIVE = Extension(
    "gac_kernels._native",
    SOURCES,
    depends=[str(path) for path in Path("csrc").rglob("*.[ch]*")],
    libraries=["c10", "torch_cpu"],
    extra_compile_args=[*FLAGS, "-fopenmp"],
    extra_link_args=["-fopenmp"],
    language="c++",
    optional=MODE != "1",
)
setup(
    ext_modules=[] if MODE == "0" else [NATIVE],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": Wheel},
)
