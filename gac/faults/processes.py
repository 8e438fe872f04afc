"""The processes of a run: heartbeats that detect dead ranks, and requests to stop between steps."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from gac.collectives import rank, world_size

logger = logging.getLogger(__name__)
INTERVAL = 1.0  # seconds between heartbeats
DEAD_AFTER = 4.0  # seconds without a heartbeat after which a rank is considered dead
WARN_AFTER = 60.0  # seconds without a heartbeat after which a warning is logged during the run


class Heartbeat:
    """Sends this rank's heartbeats and watches those of the next rank, in a daemon thread.

    The thread keeps running while a collective hangs; with a single process there is none.
    Heartbeats continue while a rank computes or waits, and end with its process (killed, stopped,
    machine lost). Each heartbeat makes three store calls: with R ranks, about 3 R calls a second.
    `activity` says what this rank is doing; the message about a dead rank contains it.
    """

    def __init__(self) -> None:
        self.activity = "set-up"
        self._single_process = world_size() == 1
        if self._single_process:
            return
        self.rank = rank()
        self.next = (self.rank + 1) % world_size()
        self._id = f"{socket.gethostname()}, pid {os.getpid()}"
        self._prefix = f"gac/beat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            timeout=timedelta(seconds=30),
        )
        self._received_at, self._last = time.monotonic(), ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # Python must not exit while the thread is in a store call

    def dead_rank_message(self) -> str | None:
        """A message if the next rank's process has died, otherwise None.

        Waits a few seconds for its heartbeat.
        """
        if self._single_process:
            return None
        started, heard = time.monotonic(), {self._last}
        while time.monotonic() - started < DEAD_AFTER + INTERVAL:
            heard.add(self._last)
            if len(heard) > 2:  # the first new heartbeat may have been sent before it died
                return None
            time.sleep(INTERVAL / 4)
        return self._message()

    def stop(self) -> None:
        """Stop monitoring at the end of the run, when ranks exit one by one."""
        if not self._single_process:
            self._done.set()
            self._thread.join()

    def _message(self) -> str:
        silence = f"no heartbeat for {time.monotonic() - self._received_at:.0f} s"
        return f"rank {self.next} is not responding: {silence} (last: {self._last})"

    def _run(self) -> None:
        number = 0
        warned_after: str | None = None
        while not self._done.is_set():
            number += 1
            try:
                heartbeat = f"{number};{self.activity} on {self._id}"
                self._store.set(f"{self._prefix}/{self.rank}", heartbeat)
                key = f"{self._prefix}/{self.next}"
                received = self._store.get(key).decode() if self._store.check([key]) else ""
            except (RuntimeError, ValueError):
                return  # the launcher has exited, and the store with it
            if received != self._last:
                self._received_at, self._last = time.monotonic(), received
            elif time.monotonic() - self._received_at > WARN_AFTER and warned_after != received:
                logger.warning("%s", self._message())
                warned_after = received
            self._done.wait(INTERVAL)


class StopRequest:
    """Context manager: the first signal sets `requested`; a second one takes effect immediately.

    A no-op outside the main thread, where Python does not allow signal handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[int, Any] = {}
        self._terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # nohup and `gac study` ignore some of them
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        for stream in self._terminals if number == signal.SIGHUP else ():  # writing would fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        logger.warning("stopping after this step; a second signal stops immediately")

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
