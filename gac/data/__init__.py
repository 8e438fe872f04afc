"""Training data: sources, examples, and the micro-batches of a step."""

from .config import DataConfig
from .examples import load_demos, load_prompts
from .source import DataError, read_rows
from .stored import Example, Examples

__all__ = [
    "DataConfig",
    "DataError",
    "Example",
    "Examples",
    "load_demos",
    "load_prompts",
    "read_rows",
]
