"""Polling for events in other processes or threads."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], description: str, timeout: float = 60.0) -> None:
    """Poll until `condition` holds; `description` is what a timeout error says it waited for."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout} s for {description}")
        time.sleep(0.01)
