"""The stable import path of the run configuration, which is defined in `gac.training.run_config`."""

from gac.training.run_config import TrainConfig

__all__ = ["TrainConfig"]
