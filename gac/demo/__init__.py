"""The demonstration: a tiny task on which mixing SFT and RL matters."""

from .run import main, run_demo

__all__ = ["main", "run_demo"]
