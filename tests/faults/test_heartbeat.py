"""Heartbeats of two real processes, one of which stops sending them."""

import atexit
import itertools
import logging
import os
import re
import socket
import sys
import threading
import time

import pytest

from gac.collectives import gather, rank
from gac.faults import processes
from gac.faults.processes import Heartbeat
from gac.parallel.config import ParallelConfig
from gac.parallel.process_group import make_accelerator, wait_for_others
from tests import ranks
from tests.waiting import wait_until


def watch(out: str) -> tuple[str | None, str | None, list[str]]:
    """What rank 0 hears of rank 1 before and after its last heartbeat, and its warnings."""
    processes.INTERVAL, processes.DEAD_AFTER = 0.02, 60.0
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    processes.logger.addHandler(handler)
    make_accelerator(ParallelConfig(timeout=20.0), (), out)
    started, beat = time.monotonic(), Heartbeat()
    gather(None)
    # Python must not wait for it after an error
    assert [t.daemon for t in threading.enumerate() if t.name == "heartbeat"] == [True]
    beat.activity = "training"
    alive = beat.dead_rank_message()
    gather(None)
    if rank() == 1:
        sys.setswitchinterval(60.0)  # no other thread runs unless this one waits for it
        beat.stop()
        assert not beat._thread.is_alive()
    gather(None)
    processes.DEAD_AFTER = 0.5
    dead = beat.dead_rank_message() if rank() == 0 else None
    if rank() == 0:
        processes.WARN_AFTER = 0.1
        wait_until(lambda: warnings, "a warning about the silence")
        assert beat.dead_rank_message()  # without another warning
    sent = beat._store.get(f"{beat._prefix}/{rank()}").partition(b";")[0]
    assert int(sent) <= 2 + (time.monotonic() - started) / processes.INTERVAL
    wait_for_others()
    atexit._run_exitfuncs()
    assert not beat._thread.is_alive()
    assert len(warnings) == 1 - beat.rank
    return alive, dead, warnings


@pytest.mark.dist
def test_a_rank_that_stops_is_named_with_its_last_activity(tmp_path) -> None:
    (alive, dead, warnings), (other, _, silent) = ranks.run(watch, str(tmp_path), ranks=2)
    assert alive is other is None
    assert silent == []
    host = re.escape(socket.gethostname())
    expected = rf"rank 1 is not responding: no heartbeat for \d\d? s \(last: \d+;training on {host}"
    assert re.match(rf"{expected}, pid \d+\)$", dead)
    assert f"pid {os.getpid()}" not in dead
    assert warnings[0].startswith("rank 1 is not responding: no heartbeat for")


class Heard(Heartbeat):
    """Has no thread; the last of `texts` is the next rank's last heartbeat."""

    def __init__(self, texts: str) -> None:
        self._single_process, self.next, self._received_at = False, 1, 0.0
        self._texts = itertools.chain(texts, itertools.repeat(texts[-1]))

    _last = property(lambda self: next(self._texts))


@pytest.mark.parametrize(("texts", "dead"), [("ab", True), ("abc", False)])
def test_only_the_second_new_heartbeat_is_a_sign_of_life(monkeypatch, texts, dead) -> None:
    monkeypatch.setattr(processes, "INTERVAL", 0.0)
    monkeypatch.setattr(processes, "DEAD_AFTER", 0.1 if dead else 60.0)
    assert bool(Heard(texts).dead_rank_message()) == dead


def test_a_single_process_has_no_thread() -> None:
    beat = Heartbeat()
    assert beat.dead_rank_message() is None
    assert not hasattr(beat, "_thread")
    beat.stop()
