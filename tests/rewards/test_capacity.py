"""How many workers fit on a machine: by its cores, its memory and its ranks."""

import os

import pytest

from gac.rewards import capacity, code
from gac.rewards.capacity import default_workers, workers_that_fit
from gac.rewards.code import CodeReward


def test_the_memory_of_a_container_is_its_limit(monkeypatch):
    limits = {}
    monkeypatch.setattr(capacity.Path, "read_text", lambda path: limits[str(path)])
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 50, "SC_PAGE_SIZE": 4}.__getitem__)
    new, old = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    for texts, size in ((["max\n", "99\n"], 99), (["70\n", "9999"], 70), (["max", "201"], 200)):
        limits.update(zip((new, old), texts, strict=True))
        assert capacity._memory_bytes() == size


def test_ranks_of_a_node_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", {0: range(8)}.__getitem__)  # of this process
    assert default_workers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert default_workers() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    for count, workers in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert default_workers() == workers


@pytest.mark.parametrize(
    ("workers", "memory_mb", "ranks", "fit"),
    [(None, 2, 1, 8), (3, 2, 1, 3), (64, 2, 1, 25), (64, 2, 4, 6), (64, 51, 1, 1)],
)
def test_together_workers_may_use_half_of_the_memory(monkeypatch, workers, memory_mb, ranks, fit):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(capacity, "_memory_bytes", lambda: 100 << 20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert workers_that_fit(workers, memory_mb) == fit


def test_a_program_and_its_tests_have_the_memory_of_two(monkeypatch):
    calls = []
    monkeypatch.setattr(code, "workers_that_fit", lambda *numbers: calls.append(numbers) or 1)
    CodeReward(memory_mb=100, workers=7).close()
    assert calls == [(7, 200)]
