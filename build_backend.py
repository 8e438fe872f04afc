"""setuptools' build backend, plus torch as a requirement if the wheel gets the native CPU kernels.

An isolated build (`python -m build`, `pip install .`) gets the torch version that
requirements/lock.in is made for; a build without isolation uses the installed torch.
"""

import importlib.util
import os
import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the unchanged hooks

TORCH = "torch==2.13.0"


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """setuptools' own requirements, plus torch if the native kernels are built and torch is
    missing.
    """
    mode = os.environ.get("GAC_EXT", "auto")
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    wanted = mode == "1" or (mode == "auto" and compiler is not None)
    found = importlib.util.find_spec("torch") is not None
    return build_meta.get_requires_for_build_wheel(config_settings) + [TORCH] * (
        wanted and not found
    )
