"""An asyncio event loop that needs no sockets and no `epoll`, which the seccomp filter refuses."""

from __future__ import annotations

import asyncio
import selectors
import threading
from asyncio import unix_events
from typing import Any


class _NoFiles(selectors._BaseSelectorImpl):
    """A selector without files: it waits until the timeout or until another thread wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.wake = threading.Event()

    def select(self, timeout: float | None = None) -> list[Any]:
        self.wake.wait(timeout)
        self.wake.clear()
        return []


class EventLoop(asyncio.SelectorEventLoop):
    """Runs coroutines, timers and threads; connections, pipes and subprocesses fail."""

    def __init__(self) -> None:
        self._no_files = _NoFiles()
        super().__init__(self._no_files)

    def _make_self_pipe(self) -> None:
        self._internal_fds = 0

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        self._no_files.wake.set()


def install() -> None:
    """Make this loop the one that `asyncio.run` and `asyncio.new_event_loop` create."""
    for name in ("_UnixDefaultEventLoopPolicy", "_DefaultEventLoopPolicy"):  # up to 3.13, from 3.14
        policy = getattr(unix_events, name, None)
        if policy is not None:
            policy._loop_factory = EventLoop
