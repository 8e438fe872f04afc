"""The sandbox: its protection layers and how they are reported, what a program can see, and
resource limits.
"""

import logging
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gac.sandbox import confine
from gac.sandbox import pool as server
from gac.sandbox.pool import JudgeSpec, Pool, Program, SandboxError
from tests.sandbox.sandboxes import (
    command,
    descendants,
    passes,
    patch_server,
    prints,
    python,
    without_namespaces,
)

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)


# --- protection layers and how they are reported
# -----------------------------------------------------


def test_start_logs_the_layers_once(caplog, pool):
    with caplog.at_level(logging.INFO, "gac"):
        layers = pool.start()
        pool.start()
    assert [record.message for record in caplog.records] == [str(layers)]
    assert str(layers).startswith("sandbox: limits, seccomp")
    assert {*layers.active, *layers.missing} == set(server.LAYERS)


def test_missing_layers_are_reported(monkeypatch, pool):
    patch_server(
        monkeypatch,
        """
from sandbox import confine
def absent(): raise OSError(38, "Function not implemented")
confine.landlock_abi = confine.drop_root = absent
""",
    )
    shown = str(pool.start())
    assert "no landlock: Function not implemented" in shown
    assert "no namespaces: bwrap is not installed" in shown
    assert passes(pool)
    status = Path(f"/proc/{pool._server._process.pid}/status").read_text()
    assert f"CapEff:\t{0:016x}\n" in status  # without a change of user, it has no use for them


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            "from sandbox import confine; confine.LIBSECCOMP = 'libnone.so'",
            "libnone.so: cannot open shared object file.*apt install libseccomp2",
        ),
        (
            "from sandbox import confine; confine.install_filter = lambda program: None",
            "the seccomp filter does not block stat, pipe, fork, socketpair, memfd_create, kill, "
            r"fcntl\(F_SETOWN\), uname, getcwd$",
        ),
        (
            "from sandbox import confine; confine._ALLOWED += ['pipe2', 'no_call']\n"
            "confine._RULES += ((confine._ALLOW, 'fcntl', (1, 4, 8)),)",
            r"the seccomp filter does not block pipe, fcntl\(F_SETOWN\)$",
        ),
        (
            "from sandbox import confine\ndef refuse(*a): raise OSError(1, 'prctl: no')\n"
            "confine.no_new_privileges = refuse",
            "prctl: no",
        ),
        (
            "import os; os.stat = os.pipe = os.fork = os.memfd_create = os.uname = None\n"
            "raise SystemExit('out of order')",
            "out of order",
        ),
    ],
    ids=[
        "no libseccomp",
        "no filter",
        "a hole in the filter",
        "no permission",
        "the server cannot start",
    ],
)
def test_nothing_runs_without_the_required_layers(monkeypatch, pool, patch, message):
    patch_server(monkeypatch, patch)
    before = set(descendants(os.getpid()))
    with pytest.raises(SandboxError, match=f"cannot be run safely here: [^,]*{message}"):
        pool.start()
    with pytest.raises(SandboxError, match="cannot be run safely here"):
        passes(pool)
    assert set(descendants(os.getpid())) <= before


def test_require_adds_required_layers(monkeypatch):
    without_namespaces(monkeypatch)
    pool = Pool(workers=1, require=["seccomp", "namespaces"])
    with pytest.raises(SandboxError, match="no namespaces: bwrap is not installed"):
        pool.start()
    pool.close()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_namespaces_are_used_where_bubblewrap_works(pool):
    layers = pool.start()
    if "namespaces" not in layers.active:
        pytest.skip(f"bubblewrap does not work here: {layers.missing['namespaces']}")
    assert passes(pool)
    ours = {name: Path(f"/proc/self/ns/{name}").readlink() for name in ("net", "ipc", "pid")}
    zygote, _ = (
        p for p in descendants(pool._server._process.pid) if command(p).startswith(sys.executable)
    )  # and its worker
    inside = {name: Path(f"/proc/{zygote}/ns/{name}").readlink() for name in ours}
    assert all(inside[name] != ours[name] for name in ours)


def test_a_broken_bubblewrap_is_not_fatal(monkeypatch, tmp_path, pool):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\nprintf 'bwrap: setting up uid map: \\377 denied\\n' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    assert "no namespaces: bwrap: setting up uid map" in str(pool.start())
    assert passes(pool)


POD = """
import ctypes, logging, os, sys
from gac.sandbox import confine
from gac.sandbox.pool import Pool, Program, JudgeSpec
if sys.argv[1] == "pod":
    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # drop the bounding set too
confine.set_capabilities(0)
confine.no_new_privileges()
if __name__ == "__main__":
    pool = Pool(workers=1)
    print(pool.start())
    good = pool.check(Program("def f(): return 1"), JudgeSpec(("assert f() == 1",)), 5, 256)
    bad = pool.run(Program("open('/etc/passwd')"), b"", 5, 256, 100)
    print(good.passed, bad.status, ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # whether dumpable
    pool.close()
"""


@pytest.mark.parametrize("kind", ["pod", "no capabilities"])
def test_sandbox_works_without_capabilities(kind):
    layers, outcome = python("-c", POD, kind).splitlines()
    assert layers.startswith("sandbox: limits, seccomp")
    assert outcome == "(True,) 1 0"


# --- what a program can see
# -------------------------------------------------------------------------


def test_program_sees_nothing_of_the_trainer(monkeypatch, pool):
    monkeypatch.setenv("GAC_SECRET", "hunter2")
    printed = prints(
        pool,
        "import atexit, os, sys\n"
        "print(dict(os.environ), sys.path, sys.path_importer_cache, sys.argv)\n"
        "print('torch' in sys.modules, 'gac' in sys.modules, atexit._ncallbacks())",
    )
    assert printed == "{} [] {} ['']\nFalse False 0\n"
    text = (
        "import gc, resource, signal\nfrom threading import stack_size\n"
        "print(stack_size(1 << 30), stack_size(), stack_size())\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU), gc.isenabled())\n"
        "print(gc.get_freeze_count() > 999, signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)"
        "\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    text += "\nimport os\nprint(signal.set_wakeup_fd(-1), os.getuid() + os.geteuid())"
    *printed, uids = prints(pool, text, cpu_seconds=7).splitlines()
    assert printed == ["2097152 67108864 2097152", "(7, 7) True", "True True", "set()"]
    wakeup, uid = map(int, uids.split())
    assert wakeup == -1
    layer = pool.start().active.get("uid", "")
    if layer.startswith("uids"):  # a program has a uid of its own
        _, first, _, last = layer.split()
        assert int(first) < uid / 2 <= int(last)
        assert passes(
            pool,
            Program("import os\ndef user(): return os.getuid()"),
            JudgeSpec(("import os\nassert user() != os.getuid()",)),
        )  # and so has its judge


def test_neither_the_solver_nor_the_server_has_the_tests(pool):
    """The solver searches every object that it can reach for the text of the tests."""
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
    suite = JudgeSpec(("secret = 'needle-in-the-tests'\nresult = found()", "assert result is True"))
    assert pool.check(program, suite, 20, 512).passed == (
        True,
        True,
    )  # it searched and found nothing
    assert passes(pool, program, JudgeSpec(("assert found() is True",)))


def test_programs_have_the_standard_library(pool):
    text = (
        "import math, re, collections, itertools, functools, heapq, bisect, random, datetime\n"
        "import decimal, fractions, statistics, string, json, typing, dataclasses, enum, hashlib\n"
        "import argparse, difflib, secrets, shlex, tomllib, unicodedata, zoneinfo, zipfile\n"
        "import numpy_is_not_here\n"
    )
    outcome = pool.check(Program(text + "def f(): pass"), JudgeSpec(("f()",)), 5, 256)
    assert "No module named 'numpy_is_not_here'" in outcome.problem
    late = (
        "import time\nprint(time.strptime('2024', '%Y').tm_year, 'a'.encode('utf-16-le'))\nexit()"
    )
    assert prints(pool, late) == "2024 b'a\\x00'\n"
    # the standard streams are UTF-8, and bytes that are not raise an error
    read = (
        "import os, sys\nfirst, second = map(os.fstat, (0, 1))\n"
        "print(sys.stdin.mode, sys.stdout.mode, first.st_size, second.st_size, second.st_nlink)\n"
        "print(input(), input())"
    )
    outcome = pool.run(Program(read), b"\xc3\xa9\n\xff\n", 5, 256, 1 << 20)
    assert outcome.stdout == b"r w 5 0 0\n"
    assert outcome.status == 1
    program = Program(read, ("def g(x: int): print(g.__annotations__)\ng(1)",))
    outcome = pool.run(program, b"\xc3\xa9\n1\n", 5, 256, 1 << 20)
    assert outcome.stdout == b"{'x': <class 'int'>}\nr w 5 0 0\n\xc3\xa9 1\n"
    assert not outcome.status


def test_program_output_is_deterministic(pool):
    text = "import random\nprint(random.random(), list({'a', 'b', 'c', 'd', 'e'}))"
    first = prints(pool, text)
    assert first.startswith(f"{random.Random(0).random()} [")
    pool.close()
    assert first == prints(pool, text)


@pytest.mark.parametrize(
    ("text", "ending", "printed"),
    [
        ("print(1, flush=True)\nimport os\nwhile True: os.urandom(1 << 20)", "timeout", b"1\n"),
        ("print(1, flush=True)\nimport time\ntime.sleep(99)", "stalled", b"1\n"),
        ("print(1, flush=True)\nimport os\nos.abort()", "crash", b"1\n"),
        ("try: bytearray(300 << 20)\nexcept MemoryError: print(1)", "ended", b"1\n"),
        ("bytearray(200 << 20)\nprint(1)", "ended", b"1\n"),
    ],
    ids=["CPU time", "wall time", "signal", "memory over the limit", "memory within the limit"],
)
def test_limits(pool, text, ending, printed):
    outcome = pool.run(Program(text), b"", 1, 256, 100)
    assert outcome.stdout == printed
    assert outcome.ending in {ending, "stalled"} - ({"stalled"} if ending == "ended" else set())


WAITING = """
import asyncio
async def main():
    await asyncio.to_thread(int)
    loop, waits = asyncio.get_running_loop(), []
    select = loop.select
    loop.select = lambda timeout: waits.append(timeout) or select(timeout)
    await asyncio.sleep(0.3)
    print(len(waits) < 9)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("text", "status", "printed"),
    [
        ("exit()", 0, ""),
        ("exit('x')", 1, ""),
        ("exit(259)", 3, ""),
        ("print(1, end='')\nraise KeyboardInterrupt", 1, "1"),
        ("import atexit\natexit.register(lambda: print(5))\nprint(4)", 0, "4\n5\n"),
        ("import sys\nsys.stdout.write('6')\nsys.stdout = None", 0, "6"),
        ("import sys\nsys.stdout = 7", 1, ""),
        ("import sys\nsys.stdout = 7\nexit(3)", 3, ""),
        ("import sys\nsys.stdin.close()\nprint(8, open(0).read())", 0, "8 \n"),
        ("import sys\nsys.stdout.close()\nopen(1, 'w').write('8')", 0, "8"),
        ("print(7, file=open('/dev/stderr', 'w'), flush=True)\nprint(8)", 0, "8\n"),
        ("import threading\nthreading.Timer(0.1, print, [9]).start()", 0, "9\n"),
        (WAITING, 0, "True\n"),
        (
            "from resource import *\nsetrlimit(RLIMIT_STACK, (-1, -1))\n"
            "try: setrlimit(RLIMIT_CPU, (9, 9))\nexcept (OSError, ValueError): print('refused')",
            0,
            "refused\n",
        ),
    ],
)
def test_scripts_end_as_in_python(pool, text, status, printed):
    outcome = pool.run(Program(text), b"", 5, 256, 100)
    assert (outcome.status, outcome.stdout.decode()) == (status, printed)


def test_nothing_is_written_to_disk(tmp_path):
    """The sandbox must work on a full disk. An audit hook records every file that the trainer's
    process opens.
    """
    script = (
        "import os, sys\n"
        "from gac.sandbox.pool import Pool, Program, JudgeSpec\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: event == 'open' and opened.append(args))\n"
        "pool = Pool(workers=1)\n"
        "pool.check(Program('def f(): return 1'), JudgeSpec(('assert f() == 1',)), 5, 256)\n"
        "pool.close()\n"
        "writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT\n"
        "named = [a for a in opened if isinstance(a[0], str) and a[0] != os.devnull]\n"
        "print(len(opened) > 0, [a for a in named if (a[2] or 0) & writing])\n"
    )
    run = subprocess.run(
        [sys.executable, "-B", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "absent")},
    )
    assert run.stdout == "True []\n"


def test_failed_memfd_is_an_error_not_a_score(monkeypatch, pool):
    pool.start()
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "memfd_create", lambda name, flags: (_ for _ in ()).throw(full))
    with pytest.raises(SandboxError, match="in-memory file for a program: No space left"):
        passes(pool)


# --- confinement by hand
# ----------------------------------------------------------------------------------


def test_errors_of_the_kernel_and_of_libseccomp_have_reasons(monkeypatch):
    with pytest.raises(OSError, match="prctl: Invalid argument"):
        confine._prctl(9999, 0)
    monkeypatch.setattr(confine, "_RULES", [(confine._ALLOW, "clone", (9, 4, 0, 0))])
    with pytest.raises(OSError, match="libseccomp: clone: Invalid argument"):
        confine.compile_filter()


@pytest.mark.parametrize(
    ("abi", "rights", "others"),
    [(1, 13, 0), (2, 14, 0), (3, 15, 0), (4, 15, 1), (5, 16, 1), (6, 16, 2), (7, 16, 2)],
)
def test_landlock_handles_every_access_that_the_kernel_knows(monkeypatch, abi, rights, others):
    """The rights of each version, by Documentation/userspace-api/landlock.rst."""
    rulesets, file = [], os.open(os.devnull, os.O_RDONLY)

    def call(name, number, *arguments):
        assert name == "syscall"
        if arguments[0] is None:  # asks for the version
            assert (number, arguments[1].value, arguments[2]) == (444, 0, 1)
            return abi
        rulesets.append((number, *(getattr(a, "value", a) for a in arguments)))
        return file

    monkeypatch.setattr(confine, "_call", call)
    assert confine.landlock_abi() == abi
    confine.apply_landlock()
    attributes = struct.pack("=3Q", 2**rights - 1, 3 * (others > 0), 3 * (others > 1))
    assert rulesets == [(444, attributes, len(attributes), 0), (446, file, 0)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


DESCRIPTORS = """
import os
from gac.sandbox import confine
def is_open(number):
    try: os.fstat(number)
    except OSError: return False
    return True
numbers = [os.dup(0) for _ in range(6)]
confine.close_all_but([0, 1, 2, numbers[4], numbers[1]])
print([is_open(number) for number in (0, 1, 2, *numbers)], flush=True)
confine.exit_with_parent(os.getppid())
print("alive", flush=True)
confine.close_all_but([1, 2])
print(is_open(0), flush=True)
confine.exit_with_parent(os.getpid())
print("its parent is another process")
"""


def test_only_kept_descriptors_stay_open_and_an_orphan_exits():
    run = subprocess.run(
        [sys.executable, "-c", DESCRIPTORS], capture_output=True, text=True, timeout=60, check=False
    )
    kept = [True, True, True, False, True, False, False, True, False]
    assert run.stdout == f"{kept}\nalive\nFalse\n"
    assert run.returncode == 1


PRIVILEGES = """
import os, sys
from gac.sandbox import confine
child = os.fork()
if not child:
    os.setgroups([7])
    os.setresgid(70001, 70001, 70001)
    os.setresuid(70001, 70001, 70001)
    os._exit(0)
if os.waitpid(child, 0)[1]:
    sys.exit(0)  # this container's root may not switch users
os.setgroups([7])
def show():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    ids = {*fields["Uid"].split(), *fields["Gid"].split()}
    kinds = ("Inh", "Eff", "Prm")
    capabilities = [int(fields[f"Cap{kind}"], 16) for kind in kinds]
    print(capabilities, sorted(map(int, ids)), fields["Groups"].split(), flush=True)
print("it may", flush=True)
confine._UNUSED_UIDS = [(70001, 70002, 1)]
confine.drop_root()
show()
confine.switch_to_uid(70002)
show()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_only_the_server_may_switch_users():
    run = subprocess.run(
        [sys.executable, "-c", PRIVILEGES], capture_output=True, text=True, timeout=60, check=False
    )
    if not run.stdout:
        pytest.skip(f"this container's root may not switch users: {run.stderr}")
    kept = [0, confine.CAN_SWITCH, confine.CAN_SWITCH]
    server, program = f"{kept} [70001] []", "[0, 0, 0] [70001, 70002] []"  # group, user
    assert run.stdout.splitlines() == ["it may", server, program]
