"""Hybrid SFT + RL post-training with an adaptive mixing weight."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gac.control.controller import ControllerConfig, GuidedController
    from gac.control.estimators import mu_star, mu_star_biased
    from gac.mixer import Mixer

    __version__: str

__all__ = [
    "ControllerConfig",
    "GuidedController",
    "Mixer",
    "__version__",
    "mu_star",
    "mu_star_biased",
]

_LAZY_MODULES = {
    "ControllerConfig": "control.controller",
    "GuidedController": "control.controller",
    "Mixer": "mixer",
    "mu_star": "control.estimators",
    "mu_star_biased": "control.estimators",
}


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that `gac --help` does not import torch."""
    if name == "__version__":
        return import_module("importlib.metadata").version("gac-kernels")
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY_MODULES[name]}", __name__), name)
