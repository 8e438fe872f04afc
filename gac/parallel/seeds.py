"""Seeds that depend only on the run, the step and the rank."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*key: int | str) -> int:
    """A seed that depends only on `key`."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def seed(number: int) -> None:
    """Set torch's seed.

    Without a GPU, this skips the stack trace that `torch.manual_seed` records for lazy CUDA
    initialization.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
