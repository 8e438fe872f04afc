"""Turns Ctrl-C and SIGTERM into a request that the training loop handles between steps."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class StopRequest:
    """`with StopRequest() as stop:` the first signal sets `stop.asked`; the second one takes effect
    immediately.

    A no-op outside the main thread, where Python does not allow signal handlers.
    """

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()
        logger.warning("stopping after this step; repeat to stop immediately")

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
