"""Parts of the sandbox without programs: requests, results, limits, deadlines and identities."""

import errno
import itertools
import json
import logging
import marshal
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

from gac.sandbox import confine, zygote
from gac.sandbox import pool as server
from gac.sandbox.pool import JudgeSpec, Layers, Pool, Program, RunResult, SandboxError, Server
from gac.sandbox.row import compile_row
from gac.sandbox.zygote import Zygote
from tests.sandbox.sandboxes import patch_server

# --- pool -----------------------------------------------------------------------------------------

KILLED, ABORTED = int(signal.SIGKILL), int(signal.SIGABRT)  # wait statuses


@pytest.mark.parametrize(
    ("ends", "ending"),
    [
        ([[0, 9]], "ended"),
        ([[3 << 8, 9], [1 << 8, 9]], "ended"),
        ([[KILLED, 2.0]], "timeout"),
        ([[KILLED, 1.9]], "crash"),  # killed for its memory, for example
        ([[ABORTED, 9]], "crash"),
        ([[ABORTED, 0], [KILLED, 2.0]], "timeout"),
        ([[0, 0], [KILLED, 9]], "timeout"),
    ],
)
def test_the_ending_follows_from_signals_and_cpu_time(ends, ending):
    assert server._ending({"ends": ends, "stalled": False}, cpu_seconds=4) == ending
    assert server._ending({"ends": ends, "stalled": True}, cpu_seconds=4) == "stalled"


SPEC = JudgeSpec(("a", "b"), "s", "e", "r", all=True)


@pytest.mark.parametrize(
    ("written", "stalled", "result"),
    [
        ("", False, RunResult("crash", (False, False))),
        ('{"passed": [tr', True, RunResult("stalled", (False, False))),
        ('{"row_problem": "no test"}', False, RunResult("ended", row_problem="no test")),
        ('{"passed": [true, true]}', False, RunResult("ended", (True, True))),
        (
            '{"passed": [true, false], "problem": "p"}',
            True,
            RunResult("stalled", (True, False), "p"),
        ),
    ],
)
def test_the_verdict_becomes_a_result(monkeypatch, pool, written, stalled, result):
    def ask(kind, *given):
        assert (kind, *given) == ("check", program, compile_row(SPEC), 3, 70, 1 << 24)
        return {"ends": [[0, 0.1]], "stalled": stalled}, written.encode()

    monkeypatch.setattr(pool, "_ask", ask)
    program = Program("p", ("i",), "t", "f")
    assert pool.check(program, SPEC, 3, 70) == result
    assert result.status == 0


def test_a_script_gets_all_its_input_and_a_part_of_its_output_is_read(pool):
    stdin = bytes(range(256)) * (65 << 10)
    text = "import sys\ndata = sys.stdin.buffer.read()\nprint(len(data), sum(data))\nexit(7)"
    result = pool.run(Program(text), stdin, 9, 256, 8)
    assert result == RunResult("ended", stdout=b"17039360", status=7)


@pytest.mark.parametrize(("kind", "needed"), [("check", 2), ("script", 1)])
def test_a_request_is_sent_at_most_three_times(monkeypatch, caplog, pool, kind, needed):
    sent, pauses = [], []
    monkeypatch.setattr(server, "time", SimpleNamespace(sleep=pauses.append))

    def ask(server, request, files):
        sent.append(request)
        position = [os.lseek(file, 0, os.SEEK_CUR) for file in files]
        assert (position, os.fstat(files[2]).st_size) == ([0, 0, 0], 0)
        assert marshal.loads(os.pread(files[0], 999, 0)) == vars(Program("p"))
        assert os.pread(files[1], 999, 0) == b"{}"
        for file in files[:read]:
            os.read(file, 1)
        os.write(files[2], b"partial")
        server.died = len(sent) == 1
        return ({"failed": "died"}, {"failed": "full"}, {"ends": [], "stalled": False})[
            len(sent) - 1
        ]

    monkeypatch.setattr(Server, "ask", ask)
    request = {"kind": kind, "cpu_seconds": 3, "memory_bytes": 7 << 20}
    read = needed
    assert pool._ask(kind, Program("p"), b"{}", 3, 7, 4) == (
        {"ends": [], "stalled": False},
        b"part",
    )
    assert sent == [request] * 3
    assert pauses == [0.0, 0.2, 0.8]
    assert caplog.text.count("died unexpectedly") == 1
    sent.clear()
    read = needed - 1  # a process exited before it read its file
    with pytest.raises(SandboxError, match="before reading its input"):
        pool._ask(kind, Program("p"), b"{}", 3, 7, 4)


class FakeServer:
    died = False

    def __init__(self, preload):
        self.layers = Layers({"uid": "uid 7", "limits": "limits"}, {"landlock": "too old"})
        self.stops = 0

    def stop(self):
        self.stops += 1


def test_servers_are_started_replaced_and_stopped(monkeypatch, caplog):
    started = []
    monkeypatch.setattr(server, "start", lambda p: started.append(FakeServer(p)) or started[-1])
    with caplog.at_level(logging.INFO, "gac"):
        monkeypatch.setenv("LOCAL_RANK", "1")
        Pool(workers=1).start()
        assert not caplog.records  # only the first rank of a node logs them
        monkeypatch.setenv("LOCAL_RANK", "0")
        sandbox = Pool(workers=1, require=["uid"])
        assert sandbox.start() is started[1].layers
        assert sandbox.start() is started[1].layers
        assert [record.message for record in caplog.records] == [str(started[1].layers)]
    assert str(started[1].layers) == "sandbox: limits, uid 7; no landlock: too old"
    started[1].died = True
    assert sandbox.map(lambda x: -x, [3, 1, 2]) == [-3, -1, -2]
    sandbox.start()
    sandbox.close()
    sandbox.close()
    assert [one.stops for one in started] == [0, 1, 1]
    with pytest.raises(SandboxError, match=r"unavailable \(no landlock: too old\)"):
        Pool(workers=1, require=["limits", "landlock"]).start()
    assert started[3].stops == 1


# --- the client of a server -----------------------------------------------------------------------


def test_a_server_that_does_not_answer_or_end_in_time_counts_as_dead(monkeypatch):
    one = Server([], namespaces=None)
    ours, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one._idle.append(ours)
    worker.send(b"{}")
    assert one.ask({"cpu_seconds": 3}, []) == {}
    assert one._idle == [ours]
    assert json.loads(worker.recv(1 << 10)) == {
        "cpu_seconds": 3,
        "wall_seconds": 12,
        "most_seconds": 120,
    }
    assert (one._control.gettimeout(), ours.gettimeout()) == (60.0, 150.0)
    for name in ("WALL_MARGIN", "STARVATION_FACTOR", "STOP_SECONDS"):
        monkeypatch.setattr(server, name, 0.1)
    os.kill(one._process.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert one.ask({"cpu_seconds": 1}, []) == {"failed": "the fork server died"}
    assert one.died
    assert time.monotonic() - started >= 0.5
    one.stop()
    assert one._process.returncode == -signal.SIGKILL
    worker.close()


def test_a_server_that_does_not_start_in_time_is_an_error(monkeypatch, pool):
    for name in ("START_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(server, name, 0.1)
    patch_server(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(SandboxError, match="cannot be run safely here: no error"):
        pool.start()


@pytest.mark.parametrize("uid", [0, 1000])
def test_namespaces_hide_everything_that_is_not_needed(monkeypatch, uid):
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(sys, "path", ["/packages", ""])
    attempts = server._namespace_attempts(["numpy"])
    assert [("--cap-drop" in a, "--unshare-user" in a) for a in attempts] == (
        [(True, False), (False, True)] if uid == 0 else [(False, True)]
    )
    for arguments in attempts:
        text = " ".join(arguments)
        for name in ("ipc", "pid", "net", "uts", "cgroup-try"):
            assert f"--unshare-{name} " in text
        assert "--as-pid-1 --proc /proc --dev /dev " in text
        bound = [b for a, b in itertools.pairwise(arguments) if a == "--ro-bind-try"]
        assert {"/usr", "/lib64", sys.prefix, sys.base_prefix, "/packages"} <= set(bound)
        assert len(bound) == len(set(bound))
        assert "/" not in bound
        assert "--bind" not in text
        assert text.count("--cap-add CAP_") == (3 if "--cap-drop ALL" in text else 0)
    assert "/packages" not in " ".join(server._namespace_attempts([])[0])


# --- the fork server ------------------------------------------------------------------------------


@pytest.fixture
def waiting(monkeypatch):
    """Waits for commands as for the processes of a program; what the kernel reports is given."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    monkeypatch.setattr(zygote, "CHECK_EVERY", 0.05)
    started = []

    def wait(*commands, wall=60.0, most=60.0, waited=0.0, threads=1):
        reports = {("schedstat", 1): int(waited * 1e9), ("stat", 17): threads}
        monkeypatch.setattr(zygote, "_about", lambda pid, *place: reports[place])
        started[:] = [subprocess.Popen(["/bin/sh", "-c", text]) for text in commands]
        result = zygote._wait([process.pid for process in started], wall, most)
        return [status for status, _ in result["ends"]], result["stalled"]

    yield wait
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for process in started:
        process.returncode = 0  # it was waited for here


SLEEP = "exec sleep 60"


@pytest.mark.parametrize(
    ("limits", "seconds", "stalled"),
    [
        ({"wall": 0.2}, 0.2, True),
        ({"wall": 0.2, "waited": 0.4}, 0.6, True),  # waiting for a core extends it
        ({"wall": 0.2, "waited": 9.0, "most": 0.7}, 0.7, True),  # up to a limit
        ({"threads": 65}, 0.0, False),
    ],
)
def test_processes_that_exceed_a_limit_are_killed(waiting, limits, seconds, stalled):
    start = time.monotonic()
    assert waiting(SLEEP, **limits) == ([KILLED], stalled)
    assert time.monotonic() - start >= seconds


def test_a_program_ends_with_its_last_process(waiting):
    """A solver that is killed because it is no longer needed has not crashed."""
    assert waiting(SLEEP, "exit 0", threads=64) == ([0, 0], False)
    # the solver's exit, which gives the reason, follows
    assert waiting("sleep 1; kill -9 $$", "exit 3") == ([3 << 8, KILLED], False)
    assert waiting("exit 5", "sleep 0.2; exit 1") == ([5 << 8, 1 << 8], False)


def test_a_server_takes_unused_uids(monkeypatch):
    state, valid, tried = Zygote({}), [], []

    def set_uid(*uids):
        tried.append(uids)
        if not valid[len(tried) - 1]:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert state._take_uids() == "uid 1000"
    assert state.uids is None
    monkeypatch.setattr(os, "getuid", lambda: 0)
    for name in ("_prctl", "set_capabilities"):
        monkeypatch.setattr(confine, name, lambda *arguments: None)
    for name in ("setgroups", "setresgid"):
        monkeypatch.setattr(os, name, lambda *arguments: None)
    monkeypatch.setattr(os, "setresuid", set_uid)
    starts = set()
    for seed in range(0, 1 << 16, 51):
        monkeypatch.setattr(os, "urandom", lambda size, seed=seed: seed.to_bytes(size, "big"))
        for outcomes, least, most, count in (
            ([True], 0x70000000, 0x80000000, 4096),
            ([False, True], 61184, 65520, 128),
        ):
            tried.clear()
            valid[:] = outcomes
            assert state._take_uids() == f"uids {state.uids[0]} to {state.uids[-1]}"
            assert least <= state.uids[0] < state.uids[-1] < most
            assert len(state.uids) == count
            assert tried[-1] == (state.uids[0],) * 3
            starts.add(state.uids[0])
    # rarely the same; with the first and the last
    assert len(starts) > 1280
    assert {0x70000000, 0x7FFFF000, 61184} < starts
    tried.clear()
    valid[:] = [False, False]
    with pytest.raises(OSError, match="no unused uid"):
        state._take_uids()
    state.uids = range(70, 73)
    monkeypatch.setattr(confine, "switch_to_uid", os._exit)
    children = [state.fork(lambda: 1, number) for number in range(5)]
    children += [state.fork(body) for body in (lambda: None, lambda: 7, lambda: 1 / 0)]
    exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert exits == [71, 72, 71, 72, 71, 0, 7, 1]  # never the server's own


def test_a_worker_answers_until_its_connection_ends(monkeypatch):
    state, masks = Zygote({}), []
    request = {"wall_seconds": 3, "most_seconds": 9}
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *change: masks.append(change))
    monkeypatch.setattr(zygote, "_wait", lambda *given: {"given": given})
    monkeypatch.setattr(state, "start", lambda sent, files, uid: [uid, len(files), sent])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [json.dumps(request).encode()], [0, 1, 2])
        ours.shutdown(socket.SHUT_WR)
        state.work(theirs, 4)
        assert json.loads(ours.recv(999)) == {"given": [[8, 3, request], 3, 9]}
    assert masks == [(signal.SIG_BLOCK, [signal.SIGCHLD])]


def test_a_child_confines_itself_in_order(monkeypatch):
    state, calls = Zygote({"landlock": "Landlock 1"}), []
    state.base_bytes, state.filter, state.uids = 5, b"filter", range(3)
    steps = ["close_all_but", "set_limits", "no_new_privileges", "apply_landlock", "install_filter"]
    for step in steps:
        monkeypatch.setattr(confine, step, lambda *given, step=step: calls.append((step, *given)))
    state.confine([7, 9], 2, 30)
    given = ([0, 1, 2, 7, 9],), (2, 35, 64), (), (), (b"filter",)
    assert calls == [(step, *values) for step, values in zip(steps, given, strict=True)]


def test_a_solver_does_not_outlive_a_judge_that_cannot_start(monkeypatch):
    solver = subprocess.Popen(["sleep", "60"])
    state, pids = Zygote({}), [solver.pid]

    def fork(body, uid):
        assert uid == 2 - len(pids)  # each has its own
        if not pids:
            raise OSError(11, "Resource temporarily unavailable")
        return pids.pop()

    monkeypatch.setattr(state, "fork", fork)
    request = {"kind": "check", "cpu_seconds": 1, "memory_bytes": 1}
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="temporarily unavailable"):
        state.start(request, [5, 6, 7], 1)
    assert set(Path("/proc/self/fd").iterdir()) <= before  # other threads may close some
    assert not Path(f"/proc/{solver.pid}").exists()
    solver.returncode = 0  # it was waited for


def test_what_the_kernel_reports_about_processes():
    size = int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0]) << 10
    assert abs(Zygote({}).base_bytes - size) < size / 20
    assert zygote._running_tasks() > len(list(Path("/proc").glob("[0-9]*/task/*"))) / 2
    assert zygote._about(os.getpid(), "absent", 0) == zygote._about(1, "stat", 99) == 0


def test_the_threads_of_another_process_are_counted():
    program = "import threading as t; [t.Thread(target=t.Event().wait).start() for _ in range(3)]"
    program += "; print(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        threads = zygote._about(process.pid, "stat", 17)
        process.kill()
    assert threads == 4


def test_limits_do_not_exceed_the_hard_ones(monkeypatch):
    hard = {resource.RLIMIT_AS: 1000, resource.RLIMIT_NOFILE: 1 << 20}
    limits = {}
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda name: (7, hard.get(name, unlimited)))
    monkeypatch.setattr(confine, "_set_limit", limits.__setitem__)
    confine.set_limits(3, 5000, 9)
    assert limits == {
        resource.RLIMIT_CPU: (3, 3),
        resource.RLIMIT_AS: (1000, 1000),
        resource.RLIMIT_STACK: (64 << 20, 64 << 20),
        resource.RLIMIT_FSIZE: (64 << 20, 64 << 20),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_NPROC: (9, 9),
        resource.RLIMIT_CORE: (0, 0),
    }


# --- the probe ------------------------------------------------------------------------------------


def fork(body):
    if pid := os.fork():
        return pid
    os._exit(body())


def test_the_probe_accepts_refusals_only(monkeypatch, capfd):
    def attempt(outcome):
        if outcome:
            raise OSError(outcome, "no")

    def probe(confine_child, **outcomes):
        monkeypatch.setattr(
            confine,
            "_ATTEMPTS",
            {name: lambda code=code: attempt(code) for name, code in outcomes.items()},
        )
        confine.verify_confinement(fork, confine_child)

    def confine_child(kept, cpu_seconds, memory_bytes):
        assert (kept, cpu_seconds, memory_bytes) == ([], 5, 1 << 28)

    probe(confine_child, a=errno.EPERM, b=errno.EPERM)
    with pytest.raises(SystemExit, match="^1$"):
        probe(confine_child, a=errno.EPERM, b=0, c=errno.EPERM, d=errno.ENOENT)
    assert capfd.readouterr().err == "the seccomp filter does not block b, d"
    with pytest.raises(SystemExit, match=r"cannot run here \(wait status 9\)"):
        probe(lambda *arguments: os.kill(os.getpid(), signal.SIGKILL), a=errno.EPERM)
