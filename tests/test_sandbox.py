"""The sandbox's processes: what is refused, what is logged, what dies with whom, who may ask."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gac.sandbox import server
from gac.sandbox.pool import Pool, Program, SandboxError, Suite

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

GOOD = Program("def add(a, b): return a + b")
SUITE = Suite(("assert add(1, 2) == 3",))
PACKAGE = str(Path(server.__file__).parent.parent)


def passes(pool, program=GOOD, suite=SUITE):
    return pool.check(program, suite, 5, 256).passed == (True,) * len(suite.tests)


def prints(pool, text, cpu_seconds=5):
    return pool.run(Program(text), b"", cpu_seconds, 256, 1 << 20).stdout.decode()


@pytest.fixture
def patch_server(monkeypatch):
    """Run Python in the fork server before it starts, outside of namespaces."""

    def patch(text):
        start = server.START.replace("from sandbox.zygote", f"{text}\nfrom sandbox.zygote")
        monkeypatch.setattr(server, "START", start)
        monkeypatch.setattr(shutil, "which", lambda name: None)

    return patch


@pytest.fixture
def plain(monkeypatch):
    """No namespaces, so that process numbers are the same on both sides."""
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.fixture
def pool():
    pool = Pool(workers=2)
    yield pool
    pool.close()


def processes_below(pid):
    """Living descendants of `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            name = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if name[0] not in "ZX":
            children.setdefault(int(name[1]), []).append(int(entry.parent.name))
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


# --- what protects, and what is said about it -----------------------------------------------------


def test_one_line_names_the_layers(caplog, pool):
    with caplog.at_level(logging.INFO, "gac"):
        layers = pool.start()
        pool.start()
    assert [record.message for record in caplog.records] == [str(layers)]
    assert str(layers).startswith("sandbox: limits, seccomp")
    assert {*layers.active, *layers.missing} == set(server.LAYERS)


def test_what_is_missing_is_in_the_line(patch_server):
    patch_server("""
from sandbox import confine
def absent(): raise OSError(38, "Function not implemented")
confine.landlock_rules = absent
""")
    pool = Pool(workers=1)
    shown = str(pool.start())
    assert "no landlock: Function not implemented" in shown
    assert "no namespaces: bwrap not installed" in shown
    assert passes(pool)
    pool.close()


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("from sandbox import confine; confine.LIBSECCOMP = 'libnone.so'",
         "libnone.so: cannot open shared object file.*apt install libseccomp2"),
        ("from sandbox import confine; confine.filter_calls = lambda program: None",
         "the seccomp filter does not hold: stat, pipe, fork"),
        ("from sandbox import confine; confine._ALLOWED.append('pipe2')",
         "the seccomp filter does not hold: pipe$"),
        ("from sandbox import confine\ndef refuse(*a): raise OSError(1, 'prctl: no')\n"
         "confine.no_new_privileges = refuse", "prctl: no"),
        ("import os; os.stat = os.pipe = os.fork = os.memfd_create = os.uname = None\n"
         "raise SystemExit('out of order')", "out of order"),
    ],
    ids=["no libseccomp", "no filter", "a hole in the filter", "no permission", "no start"],
)  # fmt: skip
def test_without_the_minimum_nothing_runs(patch_server, patch, words):
    patch_server(patch)
    pool = Pool(workers=1)
    with pytest.raises(SandboxError, match=f"cannot be run safely here: .*{words}"):
        pool.start()
    with pytest.raises(SandboxError, match="cannot be run safely here"):
        passes(pool)
    assert not [p for p in processes_below(os.getpid()) if "sandbox" in command(p)]
    pool.close()


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_require_raises_the_minimum(plain):
    pool = Pool(workers=1, require=["seccomp", "namespaces"])
    with pytest.raises(SandboxError, match="no namespaces: bwrap not installed"):
        pool.start()
    pool.close()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_namespaces_are_used_where_bubblewrap_works(pool):
    layers = pool.start()
    if "namespaces" not in layers.active:
        pytest.skip(f"bubblewrap does not work here: {layers.missing['namespaces']}")
    assert passes(pool)
    ours = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "ipc", "pid")}
    [zygote] = [p for p in processes_below(os.getpid()) if command(p).startswith(sys.executable)]
    inside = {name: os.readlink(f"/proc/{zygote}/ns/{name}") for name in ours}
    assert all(inside[name] != ours[name] for name in ours)


def test_a_broken_bubblewrap_is_not_fatal(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    pool = Pool(workers=1)
    assert "no namespaces: bwrap: setting up uid map" in str(pool.start())
    assert passes(pool)
    pool.close()


POD = """
import ctypes, logging, os, sys
from gac.sandbox import confine
from gac.sandbox.pool import Pool, Program, Suite
if sys.argv[1] == "pod":
    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # the bounding set too
confine.drop_capabilities()
confine.no_new_privileges()
if __name__ == "__main__":
    pool = Pool(workers=1)
    print(pool.start())
    good = pool.check(Program("def f(): return 1"), Suite(("assert f() == 1",)), 5, 256)
    bad = pool.run(Program("open('/etc/passwd')"), b"", 5, 256, 100)
    print(good.passed, bad.status)
    pool.close()
"""


@pytest.mark.parametrize("kind", ["pod", "no capabilities"])
def test_it_works_without_capabilities(kind):
    run = subprocess.run(
        [sys.executable, "-c", POD, kind], capture_output=True, text=True, timeout=120, check=True
    )
    layers, outcome = run.stdout.splitlines()
    assert layers.startswith("sandbox: limits, seccomp")
    assert outcome == "(True,) 1"


# --- what a program finds -------------------------------------------------------------------------


def test_a_program_finds_nothing_of_the_trainer(monkeypatch, pool):
    monkeypatch.setenv("GAC_SECRET", "hunter2")
    found = prints(
        pool,
        "import os, sys\n"
        "print(dict(os.environ), sys.path, sys.argv, 'torch' in sys.modules, 'gac' in sys.modules)",
    )
    assert found == "{} [] [''] False False\n"


def test_neither_the_solver_nor_the_server_has_the_tests(pool):
    """The solver looks for the tests' text in all objects that it can reach."""
    program = Program(
        "import gc\n"
        "def found():\n"
        "    mark = 'needle' + '-in-the-tests'\n"
        "    seen, queue = set(), list(gc.get_objects())\n"
        "    while queue:\n"
        "        thing = queue.pop()\n"
        "        if id(thing) in seen: continue\n"
        "        seen.add(id(thing))\n"
        "        if isinstance(thing, (str, bytes)) and mark[:6] in str(thing)[:300]"
        " and 'secret' in str(thing)[:300]: return True\n"
        "        if len(seen) < 300000: queue += gc.get_referents(thing)\n"
        "    return len(seen) > 10000\n"
    )
    suite = Suite(("secret = 'needle-in-the-tests'\nresult = found()", "assert result is True"))
    assert pool.check(program, suite, 20, 512).passed == (True, True)  # looked, and found nothing
    leaky = Suite(("assert found() is True",))
    assert passes(pool, program, leaky)


def test_programs_have_the_standard_library(pool):
    text = (
        "import math, re, collections, itertools, functools, heapq, bisect, random, datetime\n"
        "import decimal, fractions, statistics, string, json, typing, dataclasses, enum, hashlib\n"
        "import numpy_is_not_here\n"
    )
    outcome = pool.check(Program(text + "def f(): pass"), Suite(("f()",)), 5, 256)
    assert "No module named 'numpy_is_not_here'" in outcome.problem
    late = "import time\nprint(time.strptime('2024', '%Y').tm_year, 'a'.encode('utf-16-le'))\nexit()"
    assert prints(pool, late) == "2024 b'a\\x00'\n"


def test_two_runs_of_a_program_agree(pool):
    text = "import random\nprint(random.random(), list({'a', 'b', 'c', 'd', 'e'}))"
    first = prints(pool, text)
    pool.close()
    assert first == prints(pool, text)


@pytest.mark.parametrize(
    ("text", "ending", "printed"),
    [
        ("print(1, flush=True)\nwhile True: pass", "timeout", b"1\n"),
        ("print(1, flush=True)\nimport time\ntime.sleep(99)", "stalled", b"1\n"),
        ("print(1, flush=True)\nimport os\nos.abort()", "crash", b"1\n"),
        ("try: bytearray(300 << 20)\nexcept MemoryError: print(1)", "ended", b"1\n"),
        ("bytearray(200 << 20)\nprint(1)", "ended", b"1\n"),
    ],
    ids=["CPU time", "wall time", "signal", "too much memory", "memory enough"],
)
def test_limits(pool, text, ending, printed):
    outcome = pool.run(Program(text), b"", 1, 256, 100)
    assert outcome.stdout == printed
    assert outcome.ending in {ending, "stalled"} - ({"stalled"} if ending == "ended" else set())


def test_nothing_is_written_to_disk(tmp_path):
    """A full disk is nobody's problem: audit hooks see every file that the trainer's side opens."""
    script = (
        "import os, sys\n"
        "from gac.sandbox.pool import Pool, Program, Suite\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: event == 'open' and opened.append(args))\n"
        "pool = Pool(workers=1)\n"
        "pool.check(Program('def f(): return 1'), Suite(('assert f() == 1',)), 5, 256)\n"
        "pool.close()\n"
        "writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT\n"
        "named = [a for a in opened if isinstance(a[0], str) and a[0] != os.devnull]\n"
        "print(len(named) > 0, [a for a in named if (a[2] or 0) & writing])\n"
    )
    run = subprocess.run(
        [sys.executable, "-B", "-c", script], capture_output=True, text=True, timeout=60,
        check=True, env={**os.environ, "TMPDIR": str(tmp_path / "absent")},
    )  # fmt: skip
    assert run.stdout == "True []\n"


def test_no_memory_for_a_program_is_an_error_not_a_score(monkeypatch, pool):
    pool.start()
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "memfd_create", lambda name: (_ for _ in ()).throw(full))
    with pytest.raises(SandboxError, match="no memory file for a program: No space left"):
        passes(pool)


# --- who dies with whom ---------------------------------------------------------------------------


def test_a_server_that_dies_is_started_again(plain, caplog):
    pool = Pool(workers=2)
    pool.start()
    [zygote] = processes_below(os.getpid())[-1:]
    with ThreadPoolExecutor(1) as other:
        slow = Program("import time\ntime.sleep(0.5)\ndef add(a, b): return a + b")
        running = other.submit(passes, pool, slow)
        assert wait_until(lambda: len(processes_below(zygote)) == 2)
        children = processes_below(zygote)
        os.kill(zygote, signal.SIGKILL)
        assert wait_until(lambda: not any(map(alive, children)))  # its programs died with it
        assert running.result(60)  # it was run again
    assert passes(pool)
    assert "ended unexpectedly; it is started again" in caplog.text
    pool.close()


def test_a_server_that_always_dies_is_an_error_not_a_score(patch_server):
    patch_server("from sandbox import zygote; zygote.Zygote.start = lambda *a: exit()")
    pool = Pool(workers=1)
    with pytest.raises(SandboxError, match="gave up after 3 attempts: its fork server died"):
        passes(pool)
    pool.close()


def test_a_machine_without_processes_is_an_error_not_a_score(patch_server):
    patch_server(
        "from sandbox import zygote\n"
        "def full(self, body): raise OSError(11, 'Resource temporarily unavailable')\n"
        "import sandbox.probe; sandbox.probe.prove = lambda zygote: None\n"
        "zygote.Zygote.fork = full"
    )
    pool = Pool(workers=1)
    with pytest.raises(SandboxError, match="3 attempts: cannot start a process: Resource"):
        passes(pool)
    pool.close()


def test_a_child_that_cannot_be_confined_is_an_error_not_a_score(patch_server):
    patch_server(
        "from sandbox import zygote, confine, probe\n"
        "def refuse(program): raise OSError(12, 'Cannot allocate memory')\n"
        "def prove(zygote): confine.filter_calls = refuse\n"
        "probe.prove = prove"
    )
    pool = Pool(workers=1)
    with pytest.raises(SandboxError, match="a process ended before it could begin"):
        passes(pool)
    pool.close()


ORPHAN = """
import os, sys, threading, time
from gac.sandbox.pool import Pool, Program, Suite
pool = Pool(workers=2)
starter = threading.Thread(target=pool.start)  # the thread that starts the server may end
starter.start()
starter.join()
endless = Program(sys.argv[2])
threading.Thread(target=pool.check, args=(endless, Suite(("f()",)), 60, 256), daemon=True).start()
forked = os.fork() if sys.argv[1] == "fork" else 0
if sys.argv[1] == "fork" and not forked:
    time.sleep(60)  # holds everything open that the parent had
print(forked, flush=True)
time.sleep(60)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["plain", "fork"])
@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)"])
def test_nothing_outlives_a_trainer_that_is_killed(mode, program):
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ORPHAN, mode, program],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    forked = 0
    try:
        forked = int(trainer.stdout.readline())
        ours = []

        def running():
            ours[:] = [p for p in processes_below(trainer.pid) if p != forked]
            return len(ours) >= 3  # the server, the solver and the judge

        assert wait_until(running)
        trainer.kill()
        trainer.wait()
        assert wait_until(lambda: not any(map(alive, ours)))
    finally:
        trainer.kill()
        trainer.wait()
        if forked:
            os.kill(forked, signal.SIGKILL)
        trainer.stdout.close()


def test_close_leaves_no_process_and_opens_again(pool):
    before = set(processes_below(os.getpid()))
    assert passes(pool)
    assert set(processes_below(os.getpid())) > before
    pool.close()
    assert set(processes_below(os.getpid())) == before
    assert passes(pool)


def test_descriptors_do_not_leak(pool):
    assert passes(pool)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert passes(pool)
        assert prints(pool, "print(1)") == "1\n"
    assert len(os.listdir("/proc/self/fd")) == before


# --- who may ask ----------------------------------------------------------------------------------


def test_threads_share_a_pool(pool):
    def work(number):
        good = Program(f"def add(a, b): return a + b + {number % 2}")
        return passes(pool, good)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(24))) == [number % 2 == 0 for number in range(24)]


def test_the_first_uses_may_come_at_once():
    pool = Pool(workers=2)
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait(30)
        return passes(pool)

    before = len(processes_below(os.getpid()))
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert len(processes_below(os.getpid())) - before <= 2  # one server, perhaps inside bwrap
    pool.close()


FORKED = """
import os
from gac.sandbox.pool import Pool, Program, Suite
pool = Pool(workers=1)
def good(): return pool.check(Program("def f(): return 1"), Suite(("assert f() == 1",)), 5, 256).passed
print(good(), flush=True)
child = os.fork()
print(good(), flush=True)
pool.close()
if child:
    os.waitpid(child, 0)
    print(good(), flush=True)
    pool.close()
"""


def test_a_fork_of_the_process_gets_a_server_of_its_own():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert run.stdout.split("\n")[:-1] == ["(True,)"] * 4


def test_ranks_of_a_node_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert Pool().workers == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Pool().workers == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert Pool().workers == 1


def test_ranks_have_servers_of_their_own_under_different_uids():
    pools = [Pool(workers=1) for _ in range(3)]
    try:
        uids = {pool.start().active.get("uid", "") for pool in pools}
        assert all(map(passes, pools))
    finally:
        for pool in pools:
            pool.close()
    if os.getuid() == 0 and all(uids):
        assert len(uids) == 3


def test_the_server_loads_neither_torch_nor_this_package(plain, pool):
    pool.start()
    [zygote] = processes_below(os.getpid())[-1:]
    maps = Path(f"/proc/{zygote}/maps").read_text()
    assert "python" in maps and "torch" not in maps and "numpy" not in maps


def test_the_sandbox_imports_the_standard_library_only():
    script = (
        "import sys\nsys.path.append(sys.argv[1])\n"
        "import sandbox.zygote, sandbox.pool\n"
        "outside = {n.split('.')[0] for n in sys.modules} - sys.stdlib_module_names\n"
        "print(sorted(n for n in outside if n not in ('sandbox', '__main__')))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, PACKAGE], capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert run.stdout == "[]\n"
