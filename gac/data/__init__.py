"""Training data: sources, examples and their order, and the rows and micro-batches of a step.

This package may import `models` and earlier packages.
"""

from .examples import DataConfig, load_demos, load_prompts
from .order import Order
from .source import DataError, read_rows
from .stored import Example, Examples

__all__ = [
    "DataConfig",
    "DataError",
    "Example",
    "Examples",
    "Order",
    "load_demos",
    "load_prompts",
    "read_rows",
]
