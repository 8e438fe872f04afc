"""Collectives, process groups and locks with fake parts, against values computed by hand."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import socket
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gac.errors import RunDirectoryError, UserError
from gac.parallel import collectives, run_lock, setup
from gac.parallel.config import ParallelConfig

# ---- collectives


def test_without_a_process_group_everything_is_local() -> None:
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    assert collectives.gather([1]) == [[1]]
    assert collectives.total([1, 2.5]) == collectives.mean([1, 2.5]) == [1, 2.5]
    assert collectives.largest([True, -3]) == [1, -3]
    assert collectives.total_counts({"a": 2}) == {"a": 2}
    x = torch.ones(2)
    assert collectives.all_reduce_sum(x) is x and x.tolist() == [1, 1]


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:nccl", "cuda:nccl"])
def test_numbers_of_three_ranks(monkeypatch, config) -> None:
    """In float64, on the CPU if it has a backend."""
    events: list = []

    def all_gather(rows: list, row: Any) -> None:
        assert row.dtype == torch.float64
        for i, own in enumerate(rows):
            own.copy_(row + torch.tensor([2.0**-30 * i, -i]))

    def all_reduce(tensor: torch.Tensor) -> None:
        tensor *= 3

    def all_gather_object(values: list, value: Any) -> None:
        values[:] = [value, *({"a": i, "c": i} for i in range(1, len(values)))]

    fake = SimpleNamespace(
        is_initialized=lambda: True,
        get_rank=lambda: 2,
        get_world_size=lambda: 3,
        get_backend_config=lambda: config,
        all_gather=all_gather,
        all_reduce=all_reduce,
        all_gather_object=all_gather_object,
    )
    monkeypatch.setattr(torch, "distributed", fake)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: events.append("cuda") or self)
    values = [1.0, 7]
    assert collectives.total(values) == [3 + 3 * 2.0**-30, 18]
    assert collectives.mean(values) == [1 + 2.0**-30, 6]
    assert collectives.largest(values) == [1 + 2 * 2.0**-30, 7]
    assert events == ["cuda"] * (0 if "cpu" in config else 3)
    assert (collectives.rank(), collectives.world_size()) == (2, 3)
    assert collectives.gather({"b": 5}) == [{"b": 5}, {"a": 1, "c": 1}, {"a": 2, "c": 2}]
    assert collectives.total_counts({"a": 5, "b": 1}) == {"a": 8, "b": 1, "c": 3}
    assert collectives.all_reduce_sum(torch.tensor([2.0])).tolist() == [6]


def test_an_error_of_one_rank_is_an_error_of_all(monkeypatch) -> None:
    others: list = [None]
    monkeypatch.setattr(collectives, "gather", lambda own: [None, *others, own])

    def fail(error: Exception) -> Any:
        def work() -> None:
            raise error

        return work

    assert collectives.run_on_all_ranks(lambda: 7) == 7
    own, other, bug = UserError("own"), UserError("other"), OSError("disk")
    with pytest.raises(OSError, match="disk"):
        collectives.run_on_all_ranks(fail(bug))
    with pytest.raises(UserError, match="explained disk") as caught:
        collectives.run_on_all_ranks(fail(bug), lambda e: UserError(f"explained {e}"))
    assert caught.value.__cause__ is bug
    others[:] = [other]
    for work, expected in ((lambda: 7, other), (fail(own), own)):
        with pytest.raises(UserError) as caught:
            collectives.run_on_all_ranks(work)
        assert caught.value is expected and caught.value.__cause__ is None


# ---- joining and leaving


@pytest.fixture
def accelerators(monkeypatch):
    """The arguments of each new accelerator, and those of `_join`."""
    made: list = []
    trackers = [SimpleNamespace(value="tensorboard"), SimpleNamespace(value="wandb")]
    monkeypatch.setattr(setup, "get_available_trackers", lambda: trackers[:1])
    monkeypatch.setattr(setup, "_join", lambda timeout: made.append(timeout))
    for name in ("WORLD_SIZE", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)

    def accelerator(**keywords: Any) -> Any:
        made.append(keywords)
        return SimpleNamespace(num_processes=int(os.environ.get("RANKS", "1")))

    monkeypatch.setattr(setup, "Accelerator", accelerator)
    return made


@pytest.mark.parametrize("gpu", [True, False])
def test_the_settings_of_accelerate(monkeypatch, accelerators, gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "False")
    setup.make_accelerator(ParallelConfig(timeout=7.0), ("tensorboard",), "out")
    setup.make_accelerator(ParallelConfig("fsdp"), (), "out")
    first = {"cpu": not gpu, "mixed_precision": "no", "log_with": ["tensorboard"]}
    first["project_dir"] = "out"
    second = {**first, "log_with": None}
    assert accelerators == [7.0, first, 1800.0, second]


@pytest.mark.parametrize(
    ("variables", "trackers", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "True"}, (), "launch without --use_fsdp"),
        ({}, ("wandb",), "report_to: 'wandb' is not installed: pip install wandb"),
        ({}, ("tensorboard", "all"), "report_to='all': use names from .*tensorboard"),
        ({"WORLD_SIZE": "2"}, (), "WORLD_SIZE=2, but 1 processes joined: launch with torchrun"),
        ({"RANKS": "3", "WORLD_SIZE": "3"}, (), "parallel.replicas=2: use a divisor of 3, the nu"),
    ],
)
def test_a_job_that_cannot_start(monkeypatch, accelerators, variables, trackers, message) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    replicas = 2 if "RANKS" in variables else 1
    with pytest.raises(ValueError, match=f"^{message}"):
        setup.make_accelerator(ParallelConfig(replicas=replicas), trackers, "out")
    with pytest.raises(ValueError, match="mode='zero': use one of ddp, fsdp"):
        ParallelConfig("zero")


@pytest.mark.parametrize("gpu", [True, False])
def test_each_attempt_to_start_has_its_own_store(monkeypatch, gpu: bool) -> None:
    joined, registered, reduced = [], [], []
    fake = SimpleNamespace(
        is_initialized=lambda: False,
        PrefixStore=lambda prefix, store: (prefix, store),
        init_process_group=lambda *a, **k: joined.append((*a, k)),
        all_reduce=reduced.append,
    )
    monkeypatch.setattr(setup, "dist", fake)
    monkeypatch.setattr(
        setup, "rendezvous", lambda url, timeout: iter([("store", 2, 3), (url, timeout)])
    )
    monkeypatch.setattr(setup.atexit, "register", registered.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for size in (None, "1"):
        monkeypatch.setenv("WORLD_SIZE", size) if size else monkeypatch.delenv(
            "WORLD_SIZE", raising=False
        )
        setup._join(5.0)
    monkeypatch.setenv("WORLD_SIZE", "3")
    fake.is_initialized = lambda: True
    setup._join(5.0)
    assert not joined
    fake.is_initialized = lambda: False
    for attempt in (None, "4"):
        if attempt:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        else:
            monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        setup._join(5.0)
        backend, keywords = joined.pop()
        assert backend == ("cpu:gloo,cuda:nccl" if gpu else "gloo")
        store = f"gac/attempt-{attempt or 0}", "store"
        timeout = timedelta(seconds=5)
        assert keywords == {"store": store, "rank": 2, "world_size": 3, "timeout": timeout}
    assert registered == [setup._leave_at_exit] * 2
    assert [x.tolist() for x in reduced] == [[0.0]] * 2


def test_a_rendezvous_waits_no_longer_than_a_collective(monkeypatch) -> None:
    waits: list = []

    def rendezvous(url: str, timeout: timedelta) -> Any:
        waits.append((url, timeout))
        raise TimeoutError

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(setup, "rendezvous", rendezvous)
    with pytest.raises(TimeoutError):
        setup._join(5.0)
    assert waits == [("env://", timedelta(seconds=5))]


class Group:
    """A fake process group of two ranks, and the events of leaving it."""

    def __init__(self, monkeypatch: Any, finished: int = 0) -> None:
        self.events: list = []
        self.alive, self.finished = True, finished
        backend = SimpleNamespace(_get_default_store=lambda: self)
        fake = SimpleNamespace(
            is_initialized=lambda: self.alive,
            get_world_size=lambda: 2,
            destroy_process_group=self.destroy,
            distributed_c10d=backend,
        )
        monkeypatch.setattr(setup, "dist", fake)
        monkeypatch.setattr(gc, "collect", lambda: self.events.append("collect"))

    def destroy(self) -> None:
        self.events.append("destroy")
        self.alive = False

    def add(self, key: str, number: int) -> int:
        self.finished += number
        return self.finished

    def set(self, key: str, value: str) -> None:
        self.events.append(("set", key))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.events.append(("wait", *keys, timeout.total_seconds()))
        raise RuntimeError("the others are late")


def test_leaving_a_process_group(monkeypatch) -> None:
    wait = ("wait", "gac/all_finished", setup.LONGEST_WAIT)
    registry = {"a": 1}
    monkeypatch.setattr(setup, "_meshes", [SimpleNamespace(_pg_registry=registry), object()])
    group = Group(monkeypatch)
    setup.leave()
    assert group.events == [wait, "collect", "destroy", "collect"]
    assert not setup._meshes and not registry
    setup.leave()  # without a group
    assert len(group.events) == 4
    group = Group(monkeypatch, finished=1)
    setup.leave()
    assert group.events[:2] == [("set", "gac/all_finished"), wait]
    group = Group(monkeypatch)
    with contextlib.suppress(ValueError):
        try:
            raise ValueError
        finally:
            setup.leave()
    assert group.events == ["collect", "destroy", "collect"]  # does not wait


def test_at_exit_an_error_no_longer_holds_the_run(monkeypatch) -> None:
    def deepest() -> None:
        large = [0]  # noqa: F841 - a local of the frame
        raise OSError

    def inner() -> None:
        large = [1]  # noqa: F841 - a local too
        try:
            deepest()
        except OSError:
            raise KeyError  # noqa: B904 - its context is the OSError

    def failing() -> None:
        large, cause = [2], None  # noqa: F841 - a local too
        try:
            inner()
        except KeyError as error:
            cause = error
        raise ValueError from cause

    def locals_of(error: BaseException | None) -> list:
        names = []
        while error is not None:
            trace = error.__traceback__
            while trace is not None:
                names += [name for name in trace.tb_frame.f_locals if name == "large"]
                trace = trace.tb_next
            error = error.__cause__ or error.__context__
        return names

    try:
        failing()
    except ValueError as error:
        caught = error
    assert len(locals_of(caught)) == 5
    group = Group(monkeypatch)
    monkeypatch.setattr(sys, "last_value", caught, raising=False)
    setup._leave_at_exit()
    assert locals_of(caught) == []
    assert group.events == ["collect", "destroy", "collect", "collect"]


@pytest.mark.parametrize("gpu", [True, False])
def test_a_seed_reaches_all_devices(monkeypatch, gpu: bool) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    everywhere: list = []
    monkeypatch.setattr(torch, "manual_seed", everywhere.append)
    setup.seed(17)
    if gpu:
        assert everywhere == [17]
    else:
        first = torch.rand(3)
        torch.default_generator.manual_seed(17)
        assert torch.equal(torch.rand(3), first) and not everywhere


# ---- locks


def test_a_lock_names_its_holder_and_is_released(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    folder = tmp_path / "runs" / "a"
    for text in ("", "x" * 999):
        if text:
            (folder / run_lock.LOCK_FILE).write_text(text)  # of an earlier, longer name
        with run_lock.run_lock(folder):
            holder = json.loads((folder / run_lock.LOCK_FILE).read_text())
            assert holder == {"host": socket.gethostname(), "process": os.getpid()}
            with pytest.raises(RunDirectoryError) as error, run_lock.run_lock(folder):
                pass
        expected = f"{folder}: in use by process {os.getpid()} on host {socket.gethostname()}; wait"
        assert str(error.value).startswith(expected)
    number = os.open(folder / run_lock.LOCK_FILE, os.O_RDWR)
    fcntl.flock(number, fcntl.LOCK_EX)
    for text in ("", "{", "{}", "3"):
        os.ftruncate(number, 0)
        os.pwrite(number, text.encode(), 0)
        with pytest.raises(RunDirectoryError, match="in use by another process; wait until it"):
            run_lock.run_lock(folder).__enter__()
    monkeypatch.setenv("RANK", "1")
    with run_lock.run_lock(folder):  # rank 0 holds it for the job
        pass
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunDirectoryError):
        run_lock.run_lock(folder).__enter__()
    os.close(number)


def test_errors_of_a_lock(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "file").touch()
    entered = []
    with run_lock.run_lock(tmp_path / "file" / "run"):  # the command reports it
        entered.append(True)
    mask = os.umask(0o002)  # as on a shared file system
    try:
        with run_lock.run_lock(tmp_path / "shared"):
            mode = (tmp_path / "shared" / run_lock.LOCK_FILE).stat().st_mode & 0o777
    finally:
        os.umask(mask)
    assert entered and mode == 0o664

    numbers = iter([errno.EIO, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP])

    def flock(*_: Any) -> None:
        raise OSError(next(numbers), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="no locks"):
        run_lock.run_lock(tmp_path).__enter__()
    for _ in range(4):
        caplog.clear()
        with run_lock.run_lock(tmp_path):
            assert (tmp_path / run_lock.LOCK_FILE).read_text() == ""
        assert "does not support locks" in caplog.text
