"""Detects dead ranks: every rank sends heartbeats to the launcher's store and watches the next."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from gac.parallel.collectives import rank, ranks

logger = logging.getLogger(__name__)
INTERVAL = 1.0  # seconds between beats
SILENCE = 4.0  # seconds without a heartbeat after which a rank is considered dead
PATIENCE = 60.0  # seconds without a beat after which a warning is logged during the run


class Heartbeat:
    """A daemon thread that keeps running while a collective hangs; a no-op with a single process.

    The heartbeat continues while a rank computes or waits, and ends when its process does (killed,
    stopped, machine lost). One key per rank and one listener per key: the store sees about 3 R
    calls a second.
    """

    def __init__(self) -> None:
        self.where = "set-up"
        self._alone = ranks() == 1
        if self._alone:
            return
        self.rank = rank()
        self.next = (self.rank + 1) % ranks()
        self._id = f"{socket.gethostname()}, pid {os.getpid()}"
        self._prefix = f"gac/beat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
        self._heard, self._last, self._count = time.monotonic(), "", 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # Python must not exit while the thread is in a store call

    def gone(self) -> str | None:
        """A message if the next rank's process has died, otherwise None; blocks for a few seconds
        to be sure.
        """
        if self._alone:
            return None
        asked, count = time.monotonic(), self._count
        while time.monotonic() - asked < SILENCE + INTERVAL:
            if self._count > count + 1:  # the first beat may have been sent before it died
                return None
            time.sleep(INTERVAL / 4)
        return self._sentence()

    def stop(self) -> None:
        """Stop monitoring at the end of the run, when ranks exit one by one."""
        if not self._alone:
            self._done.set()
            self._thread.join()

    def _sentence(self) -> str:
        silent = time.monotonic() - self._heard
        return f"rank {self.next} is not responding: no heartbeat for {silent:.0f} s (last: {self._last})"

    def _run(self) -> None:
        beat, warned = 0, False
        while not self._done.is_set():
            beat += 1
            try:
                note = f"{beat};{self.where} on {self._id}"
                self._store.set(f"{self._prefix}/{self.rank}", note)
                key = f"{self._prefix}/{self.next}"
                heard = self._store.get(key).decode() if self._store.check([key]) else ""
            except (RuntimeError, ValueError):
                return  # the launcher has exited, and the store with it
            if heard != self._last:
                self._heard, self._last, warned = time.monotonic(), heard, False
                self._count += 1
            elif time.monotonic() - self._heard > PATIENCE and not warned:
                logger.warning("%s", self._sentence())
                warned = True
            self._done.wait(INTERVAL)
