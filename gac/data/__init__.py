"""Data: reading rows from files or the Hub, tokenized examples, their order, and each step's share."""

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
