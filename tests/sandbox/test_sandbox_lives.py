"""The sandbox's processes: their lifetimes, and use from several threads, forks and ranks."""

import operator
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gac.sandbox import pool as server
from gac.sandbox.pool import Pool, Program, SandboxError
from tests.sandbox.sandboxes import (
    SUITE,
    alive,
    descendants,
    passes,
    patch_server,
    prints,
    python,
    without_namespaces,
)
from tests.waiting import wait_until

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)


ERROR_ON_FORK_WITH_THREADS = (
    "-W",
    "error:This process",
)  # Python 3.12 warns when a process with threads forks; make that an error


# --- process lifetimes ---------------------------------------------------------------------------


def test_dead_server_is_restarted(monkeypatch, caplog, pool):
    with monkeypatch.context() as first:
        patch_server(first, "import builtins; builtins.first_server = True")
        pool.start()
    without_namespaces(monkeypatch)
    zygote = pool._server._process.pid
    with ThreadPoolExecutor(1) as other:
        program = Program(
            "import builtins, time\nif hasattr(builtins, 'first_server'): time.sleep(60)\n"
            + "def add(a, b): return a + b"
        )
        running = other.submit(pool.check, program, SUITE, 30, 256)
        wait_until(lambda: len(descendants(zygote)) == 3, "a worker and two processes")
        worker, *children = descendants(zygote)
        links = [Path(f"/proc/{child}/fd/{number}") for child in children for number in range(3)]
        wait_until(lambda: {str(link.readlink()) for link in links} == {os.devnull}, "no streams")
        os.kill(zygote, signal.SIGKILL)
        # its worker and programs died with it
        wait_until(lambda: not any(map(alive, [worker, *children])), "their end")
        assert running.result(60).passed == (True,)  # it was retried
    assert passes(pool)
    assert "died unexpectedly; restarting it" in caplog.text


def test_a_server_that_always_dies_is_an_error_not_a_score(monkeypatch, pool):
    patch_server(monkeypatch, "from sandbox import zygote; zygote.Zygote.work = lambda *a: exit()")
    with pytest.raises(SandboxError, match="gave up after 3 attempts: the fork server died"):
        passes(pool)


def test_failed_fork_is_an_error_not_a_score(monkeypatch, pool):
    patch_server(
        monkeypatch,
        "from sandbox import zygote\n"
        "import sandbox.confine; sandbox.confine.verify_confinement = lambda *a: None\n"
        "def full(self, body, uid=None, fork=zygote.Zygote.fork):\n"
        "    if uid is None: return fork(self, body)  # a worker\n"
        "    raise OSError(11, 'Resource temporarily unavailable')\n"
        "zygote.Zygote.fork = full",
    )
    with pytest.raises(SandboxError, match="3 attempts: cannot start a process: Resource"):
        passes(pool)


NO_FILTER = "def fail(program): raise OSError(12, 'Cannot allocate memory')\n" + (
    "def verify_confinement(*a): confine.install_filter = fail\n"
)
NO_JUDGE = """
confined = zygote.Zygote.confine
def fail(self, kept, *limits):
    if len(kept) == 3: raise OSError(12, 'Cannot allocate memory')  # the judge
    confined(self, kept, *limits)
def verify_confinement(*a): zygote.Zygote.confine = fail
"""


@pytest.mark.parametrize("patch", [NO_FILTER, NO_JUDGE], ids=["both processes", "the judge"])
def test_a_child_that_cannot_start_is_an_error_not_a_score(monkeypatch, pool, patch):
    imports = "from sandbox import zygote, confine\n"
    patch_server(monkeypatch, f"{imports}{patch}\nconfine.verify_confinement = verify_confinement")
    with pytest.raises(SandboxError, match="exited before reading its input"):
        passes(pool)


ORPHAN = """
import os, sys, threading
from gac.sandbox.pool import Pool, Program, JudgeSpec
pool = Pool(workers=2)
starter = threading.Thread(target=pool.start)  # the thread that starts the server may exit first
starter.start()
starter.join()
forked = os.fork() if sys.argv[1] == "fork" else 0
if sys.argv[1] == "fork" and not forked:
    sys.stdin.read()  # until the test ends; it keeps all of the parent's file descriptors open
    os._exit(0)
arguments = Program(sys.argv[2]), JudgeSpec(("f()",)), 60, 256
threading.Thread(target=pool.check, args=arguments, daemon=True).start()
print(forked, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["plain", "fork"])
@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)"])
def test_no_process_outlives_a_killed_trainer(mode, program):
    trainer = subprocess.Popen(
        [sys.executable, *ERROR_ON_FORK_WITH_THREADS, "-c", ORPHAN, mode, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    forked = 0
    try:
        forked = int(trainer.stdout.readline())
        sandbox_pids = []

        def running():
            sandbox_pids[:] = [p for p in descendants(trainer.pid) if p != forked]
            return len(sandbox_pids) >= 4  # the server, a worker, the solver and the judge

        wait_until(running, "the processes of the sandbox")
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not any(map(alive, sandbox_pids)), "their end")
    finally:
        trainer.kill()
        trainer.wait()
        if forked:
            os.kill(forked, signal.SIGKILL)
        trainer.stdin.close()
        trainer.stdout.close()


ABORTING = """
import os
from gac.sandbox.pool import Pool, Program, JudgeSpec
# on one core, a judge can run before its solver has exited
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
pool = Pool(workers=1)
for _ in range(20):
    print(pool.check(Program("import os; os.abort()"), JudgeSpec(("f()",)), 5, 256).ending)
pool.close()
"""


ONE_CORE = """
import os, time
from gac.sandbox.pool import Pool, Program
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
pool = Pool(workers=5)
run = lambda text: pool.run(Program(text), b"", 1, 256, 100).ending
start = time.monotonic()
endings = pool.map(run, ["while True: pass"] * 5)
# if even ten times the allowed time was not enough, the machine is too busy to tell
print(*endings if time.monotonic() - start < 40 else ["timeout"] * 5)
pool.close()
"""


def test_waiting_for_a_core_does_not_count_as_stalled():
    """Five programs need 5 s of a single core, more than the 4 s of wall-clock time allowed per CPU
    second.
    """
    assert python("-c", ONE_CORE).split() == ["timeout"] * 5


def test_crash_is_reported_even_if_the_judge_finishes_first():
    assert python("-c", ABORTING).split() == ["crash"] * 20


def test_closed_pool_leaves_no_process_and_can_be_reused(monkeypatch, pool):
    monkeypatch.setattr(server, "STOP_SECONDS", 100.0)  # it is not necessary to kill the server
    before = set(descendants(os.getpid()))
    assert passes(pool)
    assert set(descendants(os.getpid())) > before
    held = os.dup(pool._server._control.fileno())  # as by a fork of this process
    pool.close()
    os.close(held)
    assert set(descendants(os.getpid())) == before
    assert passes(pool)


def test_descriptors_do_not_leak(pool):
    assert passes(pool)

    def descriptors():
        pids = [os.getpid(), pool._server._process.pid, *descendants(pool._server._process.pid)]
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]

    before = descriptors()
    for _ in range(5):
        assert passes(pool)
        assert prints(pool, "print(1)") == "1\n"
    # the server closes the pipe of an answer after sending it
    wait_until(lambda: all(map(operator.le, descriptors(), before)), "fewer descriptors")


# --- threads, forks and ranks
# ----------------------------------------------------------------------------------


def test_threads_share_a_pool(pool):
    def work(number):
        return passes(pool, Program(f"def add(a, b): return a + b + {number % 2}"))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(24))) == [number % 2 == 0 for number in range(24)]


def test_concurrent_first_uses_start_one_server(pool):
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait(30)
        return passes(pool)

    before = len(descendants(os.getpid()))
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert len(descendants(os.getpid())) - len(descendants(pool._server._process.pid)) - before == 1


FORKED = """
import os
from gac.sandbox.pool import Pool, Program, JudgeSpec
pool = Pool(workers=1)
def good():
    return pool.check(Program("def f(): return 1"), JudgeSpec(("assert f() == 1",)), 5, 256).passed
print(good(), flush=True)
child = os.fork()
print((pool._server is None) == (child == 0), good(), flush=True)
pool.close()
if child:
    os.waitpid(child, 0)
    print(good(), flush=True)
    pool.close()
"""


def test_a_fork_of_the_process_gets_a_server_of_its_own():
    assert python(*ERROR_ON_FORK_WITH_THREADS, "-c", FORKED).split() == [
        "(True,)",
        *["True", "(True,)"] * 2,
        "(True,)",
    ]


def test_the_thread_limit_holds_per_program(pool):
    """A thread bomb reaches its own limit and does not affect the program beside it."""
    wait = "import threading, time\nevent = threading.Event()\ncount = 0\n"
    start = (
        "    threading.Thread(target=event.wait, args=(2,), daemon=True).start()\n    count += 1\n"
    )
    bomb = f"{wait}try:\n  while count < 500:\n{start}except RuntimeError: pass\n"
    modest = f"{wait}time.sleep(0.5)\nfor _ in range(40):\n{start}"
    texts = [bomb + "time.sleep(2)\nprint(count)", modest + "print(count)"]
    counts = pool.map(lambda text: prints(pool, text).strip(), texts)
    own_uids = "uids" in pool.start().active.get("uid", "")
    assert counts[1] == "40"
    assert not own_uids or counts[0] == "63"


def test_each_pool_has_its_own_server_and_uid():
    pools = [Pool(workers=1) for _ in range(3)]
    try:
        uids = {pool.start().active.get("uid", "") for pool in pools}
        assert all(map(passes, pools))
    finally:
        for pool in pools:
            pool.close()
    if os.getuid() == 0 and all(uids):
        assert len(uids) == 3


def test_the_server_loads_neither_torch_nor_numpy(monkeypatch, pool):
    without_namespaces(monkeypatch)
    pool.start()
    zygote = pool._server._process.pid
    maps = Path(f"/proc/{zygote}/maps").read_text()
    assert "python" in maps
    assert "torch" not in maps
    assert "numpy" not in maps
    folder = Path(f"/proc/{zygote}")
    assert sorted(filter(None, (folder / "environ").read_text().split("\0"))) == [
        "LD_BIND_NOW=1",
        "MALLOC_ARENA_MAX=1",
        "OMP_NUM_THREADS=1",
        "OPENBLAS_NUM_THREADS=1",
        "PYTHONHASHSEED=0",
    ]
    assert (folder / "cwd").readlink() == Path("/")
    assert os.getsid(zygote) == zygote
    assert (folder / "oom_score_adj").read_text() == "1000\n"  # programs die before the trainer
    assert "NoNewPrivs:\t1\n" in (folder / "status").read_text()
    assert {(folder / f"fd/{number}").readlink() for number in range(2)} == {Path(os.devnull)}


def test_the_sandbox_imports_the_standard_library_only():
    script = (
        "import sys\nsys.path.append(sys.argv[1])\n"
        "import sandbox.zygote, sandbox.pool\n"
        "outside = {n.split('.')[0] for n in sys.modules} - sys.stdlib_module_names\n"
        "print(sorted(n for n in outside if n not in ('sandbox', '__main__', '__mp_main__')))"
    )
    assert python("-I", "-S", "-c", script, str(Path(server.__file__).parent.parent)) == "[]\n"
