"""The build backend: that of setuptools, with torch as a requirement for the native CPU kernels.

An isolated build (`python -m build`, `pip install .`) installs the torch version that
requirements/lock.in is made for; a build without isolation uses the installed torch.
"""

import importlib.util
import os
import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the unchanged hooks

TORCH = "torch==2.13.0"


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """The requirements of setuptools, plus torch if it is needed and missing."""
    mode = os.environ.get("GAC_EXT", "auto")
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    builds_native = mode == "1" or (mode == "auto" and compiler is not None)
    installed = importlib.util.find_spec("torch") is not None
    return build_meta.get_requires_for_build_wheel(config_settings) + [TORCH] * (
        builds_native and not installed
    )
