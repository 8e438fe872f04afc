"""Turns Ctrl-C, SIGTERM and SIGHUP into a request that the training loop handles between steps."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class StopRequest:
    """Context manager: the first signal sets `requested`; a second one takes effect immediately.

    A no-op outside the main thread, where Python does not allow signal handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # nohup ignores SIGHUP
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        for stream in (sys.stdout, sys.stderr) if number == signal.SIGHUP else ():
            if stream.isatty():  # the terminal is gone: writing to it would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        logger.warning("stopping after this step; a second signal stops immediately")

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
