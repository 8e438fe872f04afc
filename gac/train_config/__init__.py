"""Stable import path of the run configuration, which `gac.training.run_config` defines."""

from gac.training.run_config import TrainConfig

__all__ = ["TrainConfig"]
