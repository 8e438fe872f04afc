"""Helpers for the sandbox tests: small programs, checks, and process inspection."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gac.sandbox import pool as server
from gac.sandbox.pool import JudgeSpec, Program

GOOD = Program("def add(a, b): return a + b")
SUITE = JudgeSpec(("assert add(1, 2) == 3",))


def passes(pool, program=GOOD, suite=SUITE):
    return pool.check(program, suite, 5, 256).passed == (True,) * len(suite.tests)


def prints(pool, text, cpu_seconds=5):
    return pool.run(Program(text), b"", cpu_seconds, 256, 1 << 20).stdout.decode()


def python(*arguments):
    """What another interpreter prints."""
    return subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, timeout=200, check=True
    ).stdout


def descendants(pid):
    """Running descendants of `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # the process exited in the meantime
            continue
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    pids, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            pids.append(child)
            queue.append(child)
    return pids


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def patch_server(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make fork servers run `text` before they start, without namespaces."""
    monkeypatch.setattr(
        server, "START", server.START.replace("from sandbox.zygote", f"{text}\nfrom sandbox.zygote")
    )
    without_namespaces(monkeypatch)


def without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide bwrap, so that process ids are the same inside and outside the sandbox."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
