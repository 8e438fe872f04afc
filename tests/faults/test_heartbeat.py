"""The heartbeat of a rank, with a fake store, clock and thread."""

from __future__ import annotations

import logging
import os
import socket
import threading
from datetime import timedelta

import pytest

from gac.faults import processes
from gac.faults.processes import DEAD_AFTER, INTERVAL, WARN_AFTER, Heartbeat


class Store(dict):
    """A store in which the other rank's heartbeat advances at every check while `alive`."""

    alive = True

    def __init__(self, *address, **options) -> None:
        self.address, self.options = address, options

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        if self.alive:
            (key,) = keys
            count = int(self.get(key, b"0;").decode().partition(";")[0]) + 1
            self.set(key, f"{count};training on host, pid 7")
        return keys[0] in self


class Thread:
    """A fake thread, which runs nothing by itself."""

    def __init__(self, target, name, daemon) -> None:
        assert daemon  # the process may exit while it runs
        self.target, self.started, self.joined = target, False, False

    def start(self) -> None:
        self.started = True

    def join(self) -> None:
        self.joined = True


@pytest.fixture
def last_rank(monkeypatch):
    """The heartbeat of rank 2 of 3, its clock, and a function that runs it for some intervals."""
    clock = [100.0]
    monkeypatch.setattr(processes, "world_size", lambda: 3)
    monkeypatch.setattr(processes, "rank", lambda: 2)
    monkeypatch.setattr(processes.dist, "TCPStore", Store)
    monkeypatch.setattr(processes.threading, "Thread", Thread)
    at_exit: list = []
    monkeypatch.setattr(processes.atexit, "register", at_exit.append)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "77")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    beat = Heartbeat()
    assert at_exit == [beat.stop]
    timeout = beat._store.options["timeout"]
    assert timedelta(seconds=10) < timeout < timedelta(minutes=1)  # rank 0 may be dead
    assert not (beat._store.options["is_master"] or beat._store.options["wait_for_workers"])
    assert beat._thread.started and beat._thread.target == beat._run
    done = threading.Event
    assert isinstance(beat._done, done)

    def run(intervals: int, alive: dict[int, bool] | None = None) -> None:
        """`alive`: from which interval on the other rank is alive, or no longer."""
        left = [intervals]

        class Done(done):
            def is_set(self) -> bool:
                return left[0] == 0

            def wait(self, timeout: float) -> None:
                assert timeout == INTERVAL
                clock[0] += timeout
                left[0] -= 1
                store = beat._store
                store.alive = (alive or {}).get(intervals - left[0], store.alive)

        beat._done = Done()
        beat._run()

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        run(1)

    monkeypatch.setattr(processes.time, "sleep", sleep)
    return beat, run, clock


def test_it_writes_its_own_and_reads_the_next_heartbeat(last_rank) -> None:
    beat, run, clock = last_rank
    assert beat._store.address == ("host", 77)
    run(1)
    own = f"1;set-up on {socket.gethostname()}, pid {os.getpid()}"
    assert beat._store["gac/beat/3/2"].decode() == own
    assert beat._last == "1;training on host, pid 7" and "gac/beat/3/0" in beat._store
    before = clock[0]
    assert beat.dead_rank_message() is None
    assert clock[0] - before == 2 * (INTERVAL + INTERVAL / 4)  # the second new heartbeat suffices
    beat.activity = "waiting"
    run(1)
    assert b";waiting on " in beat._store["gac/beat/3/2"]
    beat._done = threading.Event()
    beat.stop()
    assert beat._thread.joined and beat._done.is_set()


def test_a_dead_rank_is_named_with_its_last_heartbeat(last_rank) -> None:
    beat, run, clock = last_rank
    run(2)
    beat._store.alive = False
    before = clock[0]
    silence = "no heartbeat for 6 s (last: 2;training on host, pid 7)"
    assert beat.dead_rank_message() == f"rank 0 is not responding: {silence}"
    assert clock[0] - before == DEAD_AFTER + INTERVAL


def test_a_heartbeat_sent_before_the_death_is_not_a_sign_of_life(last_rank) -> None:
    beat, run, _ = last_rank
    run(2)
    beat._store.set("gac/beat/3/0", "3;training on host, pid 7")
    beat._store.alive = False
    assert "(last: 3;training" in beat.dead_rank_message()


def test_one_warning_per_silence(last_rank, caplog) -> None:
    caplog.set_level(logging.WARNING)
    _, run, _ = last_rank
    n = int(WARN_AFTER / INTERVAL) + 3
    run(6 * n, {n: False, 3 * n: True, 4 * n: False})
    assert len(caplog.records) == 2
    assert all(text.startswith("rank 0 is not responding") for text in caplog.messages)


def test_a_silent_rank_is_warned_about_after_a_minute(last_rank, caplog) -> None:
    caplog.set_level(logging.WARNING)
    beat, run, _ = last_rank
    beat._store.alive = False
    run(int(WARN_AFTER / INTERVAL) + 1)
    assert not caplog.records  # the silence is exactly WARN_AFTER
    run(1)
    assert caplog.messages == ["rank 0 is not responding: no heartbeat for 61 s (last: )"]


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_lost_store_ends_the_thread(last_rank, monkeypatch, error) -> None:
    beat, run, _ = last_rank

    def lost(key: str, value: str) -> None:
        raise error("connection closed")

    monkeypatch.setattr(beat._store, "set", lost)
    run(5)
    assert not beat._store and beat._count == 0


def test_a_single_process_has_no_thread() -> None:
    beat = Heartbeat()
    assert beat.dead_rank_message() is None and not hasattr(beat, "_thread")
    beat.stop()
