"""Heartbeats of two real processes, one of which stops sending them."""

import logging
import os
import re
import socket
import threading

import pytest

from gac.faults import processes
from gac.faults.processes import Heartbeat
from gac.parallel.collectives import gather, rank
from gac.parallel.config import ParallelConfig
from gac.parallel.setup import make_accelerator
from tests import ranks
from tests.waiting import wait_until


def watch(out: str) -> tuple[str | None, str | None, list[str]]:
    """What rank 0 hears of rank 1 before and after its last heartbeat, and its warnings."""
    processes.INTERVAL, processes.DEAD_AFTER, processes.WARN_AFTER = 0.02, 1.0, 0.5
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    processes.logger.addHandler(handler)
    make_accelerator(ParallelConfig(timeout=20.0), (), out)
    beat = Heartbeat()
    gather(None)
    # Python must not wait for it after an error
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "heartbeat")
    beat.activity = "training"
    alive = beat.dead_rank_message()
    gather(None)
    if rank() == 1:
        beat.stop()
    gather(None)
    dead = beat.dead_rank_message() if rank() == 0 else None
    if rank() == 0:
        wait_until(lambda: warnings, "a warning about the silence")
        count = len(warnings)
        beat.stop()
        assert not beat._thread.is_alive() and len(warnings) == count == 1
    gather(None)
    return alive, dead, warnings


@pytest.mark.dist
def test_a_rank_that_stops_is_named_with_its_last_activity(tmp_path) -> None:
    (alive, dead, warnings), (other, _, silent) = ranks.run(watch, str(tmp_path), ranks=2)
    assert alive is other is None and silent == []
    host = re.escape(socket.gethostname())
    expected = rf"rank 1 is not responding: no heartbeat for [12] s \(last: \d+;training on {host}"
    assert re.match(rf"{expected}, pid \d+\)$", dead) and f"pid {os.getpid()}" not in dead
    assert warnings[0].startswith("rank 1 is not responding: no heartbeat for")


def test_a_single_process_has_no_thread() -> None:
    beat = Heartbeat()
    assert beat.dead_rank_message() is None and not hasattr(beat, "_thread")
    beat.stop()
