"""setuptools' build backend, which asks for torch where a wheel gets the native CPU kernels.

An isolated build (`python -m build`, `pip install .`) has no torch of its own and is given the one
that requirements/lock.in is made for; a build without isolation takes the torch at hand.
"""

import importlib.util
import os
import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the hooks that stay as they are

TORCH = "torch==2.13.0"


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """setuptools' own requirements, and torch if GAC_EXT and a compiler say so."""
    mode = os.environ.get("GAC_EXT", "auto")
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    wanted = mode == "1" or (mode == "auto" and compiler is not None)
    found = importlib.util.find_spec("torch") is not None
    return build_meta.get_requires_for_build_wheel(config_settings) + [TORCH] * (
        wanted and not found
    )
