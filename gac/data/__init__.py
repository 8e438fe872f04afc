"""Data: rows of files and hubs, examples for the model, their order, a step's share of them."""

from .examples import DataConfig, Example, Examples, load_demos, load_prompts
from .order import Order
from .source import DataError, read_rows

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
