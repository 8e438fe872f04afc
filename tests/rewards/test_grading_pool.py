"""The grading workers: when they start, what they import, and that none is left behind."""

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from gac.rewards import grading_pool, grading_worker
from gac.rewards.grading_pool import GradingPool
from tests.sandbox.sandboxes import alive
from tests.waiting import wait_until

# In place of math-verify, which takes half a second to import.
STUB = """
import os, pathlib, signal

def parse(text, parsing_timeout):
    if text == "always" or text == "once" and not pathlib.Path(os.environ["SEEN"]).exists():
        pathlib.Path(os.environ["SEEN"]).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    while text == "spin":
        pass
    if text == "power":
        9**9**9  # computed in C while holding the GIL
    if text == "sleep":
        signal.pause()
    return [text]

def verify(reference, answer, timeout_seconds):
    return reference == answer
"""


@pytest.fixture
def stub(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))


def workers_of(parent):
    """Process ids of the running grading workers that `parent` started."""
    pids = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            command = (status.parent / "cmdline").read_bytes()
        except (OSError, ValueError):  # the process exited in the meantime
            continue
        running = fields["State"][0] != "Z" and b"grading_worker" in command
        if running and int(fields["PPid"]) == parent:
            pids.append(int(status.parent.name))
    return pids


def cpu_ticks(pid):
    """CPU time of a process, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def finished(script, *arguments, **keywords):
    """Run a script in another process."""
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **keywords)


FORK_SCRIPT = """
import os, signal
from gac.rewards.grading_pool import GradingPool
pool = GradingPool(timeout=4.0, workers=1)
print(pool.grade([("7", "7")]), flush=True)
pool._lock.acquire()  # as if another thread were grading; the child has no such thread
child = os.fork()
if child:
    pool._lock.release()
else:
    signal.alarm(20)  # ends a child that waits for the lock
print(pool.grade([("7", "8")]), flush=True)  # the parent's worker must not answer the child
if child:
    os.waitpid(child, 0)
    print(pool.grade([("7", "7")]), flush=True)
pool.close()
"""


@pytest.mark.usefixtures("stub")
def test_a_forked_process_gets_its_own_workers():
    printed = finished(FORK_SCRIPT).stdout.splitlines()
    assert printed == ["['right']", "['wrong']", "['wrong']", "['right']"]


@pytest.mark.usefixtures("stub")
def test_workers_start_when_needed_and_end_with_close():
    before = set(workers_of(os.getpid()))
    pool = GradingPool(timeout=3.0, workers=2)
    assert set(workers_of(os.getpid())) == before
    assert pool.grade([("7", "7")]) == ["right"]
    [worker] = set(workers_of(os.getpid())) - before  # one pair needs one worker
    assert pool.grade([("7", "7"), ("7", "8")]) == ["right", "wrong"]
    assert worker in workers_of(os.getpid())  # it is used again
    pool.close()
    assert set(workers_of(os.getpid())) == before
    assert pool.grade([("7", "8")]) == ["wrong"]  # the pool starts new workers
    pool.close()


def test_close_cancels_the_pairs_that_wait():
    pool = GradingPool(timeout=3.0, workers=1)
    assert pool.grade([]) == []
    begun, cancelled = threading.Event(), threading.Event()
    pool._threads.submit(lambda: begun.set() or cancelled.wait(20))
    waiting = pool._threads.submit(print)
    waiting.add_done_callback(lambda _: cancelled.set())
    begun.wait(60)
    pool.close()
    assert waiting.cancelled()


HOLDING_SCRIPT = """
import os, signal, time
from gac.rewards import grading_pool
grading_pool._STOP_SECONDS = 100.0
pool = grading_pool.GradingPool(timeout=4.0, workers=2)
print(pool.grade([("7", "7"), ("7", "8")]), flush=True)
child = os.fork()
if child == 0:
    signal.pause()  # holds the workers' pipes open
started = time.monotonic()
pool.close()
print(time.monotonic() - started < 50, flush=True)
os.kill(child, signal.SIGKILL)
"""


@pytest.mark.usefixtures("stub")
def test_a_fork_that_holds_the_pipes_does_not_keep_workers_alive():
    assert finished(HOLDING_SCRIPT).stdout.splitlines() == ["['right', 'wrong']", "True"]


WAITING_SCRIPT = """
import os, resource, signal, sys, time
from gac.rewards import grading_worker as worker

def wait(parent, waits=[]):
    waits.append(1)
    timers = [signal.getitimer(kind) for kind in (signal.ITIMER_REAL, signal.ITIMER_PROF)]
    assert len(waits) == 1 or timers == [(0, 0)] * 2  # those of a check have been stopped
    return True

def grade(text, seconds):
    time.sleep(float(seconds))
    print("not a verdict")
    return f"{text} {resource.getrlimit(resource.RLIMIT_AS)[0] >> 30}"

signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
worker.WALL_PER_CPU_SECOND = 40.0
worker.make_grader = lambda: grade
if sys.argv[1] == "slow start":
    worker.STARTUP_SECONDS = 0.1
    worker.make_grader = lambda: time.sleep(50)
if sys.argv[1] == "check":
    worker._wait_for_request = wait
worker.main(0.05, os.getppid())
"""


@pytest.mark.parametrize(
    ("kind", "requests", "printed", "status"),
    [
        ("check", '["a", "0.1"]\n["b", "0"]\n["c", "50"]\n', "ready\na 4\nb 4\n", -signal.SIGALRM),
        ("slow start", "", "", -signal.SIGALRM),
        ("end", "\n", "ready\n", 0),
    ],
)
def test_a_worker_that_waits_ends_too(kind, requests, printed, status):
    """Its limits do not depend on what the parent does with signals, or on the previous check."""
    run = finished(WAITING_SCRIPT, kind, input=requests)
    assert (run.stdout, run.returncode) == (printed, status)


@pytest.fixture
def started():
    """A pool with a worker, and the worker's process id."""
    pool = GradingPool(timeout=3.0, workers=1)
    before = set(workers_of(os.getpid()))
    pool.grade([("7", "7")])
    [worker] = set(workers_of(os.getpid())) - before
    yield pool, worker
    pool.close()


@pytest.mark.usefixtures("stub")
def test_a_worker_that_is_killed_while_idle_is_replaced(started):
    os.kill(started[1], signal.SIGKILL)
    assert started[0].grade([("7", "7"), ("7", "6")]) == ["right", "wrong"]


@pytest.mark.usefixtures("stub")
def test_a_worker_that_does_not_end_is_killed(monkeypatch, started):
    monkeypatch.setattr(grading_pool, "_STOP_SECONDS", 0.05)
    os.kill(started[1], signal.SIGSTOP)
    process = started[0]._idle.queue[0]._process
    started[0].close()
    assert not alive(started[1])
    assert process.stdout.closed


def test_a_worker_has_few_modules_limited_memory_and_a_session_of_its_own(started):
    maps = Path(f"/proc/{started[1]}/maps").read_text()
    assert "python" in maps
    assert "torch" not in maps
    assert "numpy" not in maps
    limits = Path(f"/proc/{started[1]}/limits").read_text().splitlines()
    [line] = [line for line in limits if line.startswith("Max address space")]
    # on Ctrl-C, the terminal signals the foreground group
    assert line.split()[3] == str(4 << 30)
    assert os.getpgid(started[1]) != os.getpgid(0)


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("raise ImportError('broken install')", "cannot start: broken install"),
        ("import check", "cannot start: No module named 'check'"),  # beside the worker's file
        (
            r"import os; parse = verify = os.write(1, b'text of another package\n')",
            "text of another package",
        ),
        ("import os; os.write(2, b'hidden'); os._exit(3)", "exit status 3"),
    ],
)
def test_a_worker_that_cannot_start_says_why(monkeypatch, tmp_path, capfd, module, problem):
    (tmp_path / "math_verify.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = GradingPool(timeout=3.0, workers=1)
    with pytest.raises(RuntimeError, match=rf"failed to start \({problem}\)"):
        pool.grade([("7", "7")])
    pool.close()
    assert capfd.readouterr().err == ""


ORPHAN_SCRIPT = """
import os, signal, sys
from gac.rewards.grading_pool import GradingPool
pool = GradingPool(timeout=4.0, workers=2)
print(pool.grade([("7", "7"), ("7", "8")]), flush=True)
forked = os.fork() if sys.argv[1] == "fork" else 0
if sys.argv[1] == "fork" and forked == 0:
    signal.pause()  # holds the workers' pipes open after the parent's death
print(forked, flush=True)
pool.grade([("7", sys.argv[2])] if sys.argv[2] else [("7", "7")])
signal.pause()
"""


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("mode", "completion"),
    [("plain", ""), ("plain", "power"), ("fork", "")],
    ids=["idle", "in a hanging check", "idle, pipes held open by a fork"],
)
def test_no_worker_outlives_a_parent_that_is_killed(mode, completion):
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN_SCRIPT, mode, completion],
        stdout=subprocess.PIPE,
        text=True,
    )
    forked = 0
    try:
        assert parent.stdout.readline() == "['right', 'wrong']\n"
        forked = int(parent.stdout.readline())
        workers = workers_of(parent.pid)
        assert len(workers) == 2
        if completion:
            before = sum(map(cpu_ticks, workers))
            wait_until(
                lambda: sum(map(cpu_ticks, workers)) > before + 10, "a worker inside a check"
            )
        parent.kill()
        parent.wait(60)
        wait_until(lambda: not any(alive(worker) for worker in workers), "the workers to exit")
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)
        parent.kill()
        parent.stdout.close()


def test_ranks_of_a_node_share_its_cores(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for cores, workers in ((10, 3), (8, 2), (2, 1), (99, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        assert GradingPool(5.0).workers == workers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout": 0}, "timeout=0: use a finite number > 0"),
        ({"timeout": math.inf}, "timeout=inf: use a finite number > 0"),
        ({"timeout": 1, "workers": 0}, "workers=0: use an integer >= 1"),
        ({"timeout": 1, "workers": 1.5}, "workers=1.5: use an integer >= 1"),
    ],
    ids=["timeout", "endless timeout", "workers", "half a worker"],
)
def test_invalid_pool_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GradingPool(**arguments)


def test_checks_have_no_time_limit_of_their_own(monkeypatch):
    """Those of math-verify would replace the timers of the worker."""
    limits, compared = [], []

    def parse(text, parsing_timeout=5):
        limits.append(parsing_timeout)
        return [int(text)] if text else []

    def verify(reference, answer, timeout_seconds=5):
        limits.append(timeout_seconds)
        compared.append((reference, answer))
        return reference == answer

    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(parse=parse, verify=verify))
    grade = grading_worker.make_grader()
    pairs = [("7", "7"), ("7", "8"), ("", "7"), ("x", "7"), ("7", "x")]
    assert [grade(*p) for p in pairs] == [
        "right",
        "wrong",
        "bad reference",
        "bad reference",
        "wrong",
    ]
    assert set(limits) == {None}
    assert compared == [([7], [7]), ([7], [8])]


@pytest.mark.usefixtures("stub")
def test_a_pair_that_crashes_a_worker_is_tried_twice_and_a_slow_one_is_stopped():
    pool = GradingPool(timeout=0.2, workers=1)
    pairs = [("once", "once"), ("7", "always"), ("7", "spin"), ("7", "7"), ("7", "8")]
    assert pool.grade(pairs) == ["right", "crash", "timeout", "right", "wrong"]
    pool.close()
    pool = GradingPool(timeout=0.05, workers=1)  # a second of wall-clock time
    assert pool.grade([("7", "sleep")]) == ["timeout"]
    pool.close()
