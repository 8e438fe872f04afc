"""Runs tests on mutants (see `tools.mutants`); the current directory must be a clone."""

# ruff: noqa: SIM905 - lists of words
from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import multiprocessing.process
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.mutations import Mutant, draw

# test files that take minutes or check texts
SKIPPED = """architecture bench build_cuda cuda_order cuda_sketch cuda_source demo docs first_run
launch light_install overhead packages peers readme scenarios site typing""".split()
MARKERS = "not gpu and not release and not full"
PRELOADED = "torch transformers accelerate pytest hypothesis coverage triton".split()
OWN = "gac gac_kernels tests tools bench examples conftest __main__ __mp_main__".split()
MEMORY = 10 * 2**30  # bytes of data that the tests of one mutant may allocate
COVERAGE_SECONDS = 400.0  # the tests of a file that run after this are not used
QUICK_SECONDS = 3.0  # total time of the tests that run first
DEFAULTS = "tests/cli/test_defaults.py"  # its tests import everything
MISTAKES = "tests/cli/test_mistakes.py"  # its commands reach all packages, in other processes
# files that run hundreds of programs, or check many settings
BROAD = (
    DEFAULTS,
    "tests/sandbox/test_attacks.py",
    "tests/kernels/test_compile.py",
    "tests/sandbox/test_honest.py",
    "tests/training/test_keys.py",
)
FOLDERS = {"gac_kernels": "kernels", "config": "cli"}  # of the tests of a module
LONGEST = 240.0  # seconds of all tests that run on a mutant that the cap would let survive
# of processes that a test starts; the context is the name of the test
PROCESSES = """[run]
context = ${GAC_TEST}
data_file = {folder}/data
disable_warnings = no-data-collected,module-not-measured,module-not-imported,couldnt-parse
include = {tree}/gac/*,{tree}/gac_kernels/*
parallel = true
patch = _exit,fork
sigterm = true
"""
FILE_SECONDS = 0.3  # estimate of the time to collect one test file
RESULTS, TRIAGE = Path("tests/mutants/results.jsonl"), Path("tests/mutants/equivalent.json")
# test file to the seconds of its tests, and to the tests of each line
Coverage = dict[str, dict[str, Any]]


def read_results(root: Path) -> list[dict[str, Any]]:
    """All results, oldest first."""
    path = root / RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_triage(root: Path) -> dict[str, str]:
    """Mutants that behave like the original code, each with the reason why."""
    return json.loads((root / TRIAGE).read_text()) if (root / TRIAGE).exists() else {}


class Server:
    """Forks a process for each test file, to measure coverage, and for each mutant."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        self.root, self.options, self.isolated = root, options, options.isolated
        self.cache = root / "build" / "mutants"
        self.cache.mkdir(parents=True, exist_ok=True)
        self.failed = Path.cwd().parent / "failed"
        self.kills: Counter[str] = Counter()  # per test
        self.clock = int(time.time()) - 10**7  # mtimes of mutated files, all different
        self.unreliable: set[str] = set()  # tests that also fail without a mutant
        self.temporary = Path.cwd().parent / "tmp"
        preload(PRELOADED)

    def fork(self, work: Callable[[], int], deadline: float) -> tuple[int | None, float]:
        """Run `work` in a child process; return its exit status (None: timeout) and its seconds."""
        began = time.monotonic()
        child = os.fork()
        if not child:
            os.setsid()
            log = os.open(self.temporary.parent / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            status = 70
            try:
                status = work()
            except Exception:  # a test or a plugin may raise anything
                traceback.print_exc()
            finally:
                os._exit(status)
        handle = os.pidfd_open(child)
        ready = select.select([handle], [], [], deadline)[0]
        os.close(handle)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if self.isolated:  # the namespace's first process is this one, which -1 excludes
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0 if self.isolated else os.WNOHANG)[0]:
                pass
        for left in self.temporary.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        return os.waitstatus_to_exitcode(status) if ready else None, time.monotonic() - began

    def coverage(self) -> Coverage:
        """Coverage of the test files; cached for each file until it changes."""
        files: dict[Path, Path] = {}
        for path in sorted(Path("tests").rglob("test_*.py")):
            if path.stem.removeprefix("test_") in SKIPPED or path.stem.endswith("_gpu"):
                continue
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            files[path] = self.cache / f"{path.stem}-{digest}.json"
        for path in random.sample([*files], len(files)):  # servers that run at once share the work
            cached = files[path]
            if not cached.exists():
                status, seconds = self.fork(partial(measure, path, cached), 900)
                print(f"coverage of {path}: {seconds:.0f} s, status {status}", flush=True)
                if status == 70:  # an exception, not a failed test
                    raise RuntimeError((self.temporary.parent / "log").read_text())
                if not cached.exists():
                    cached.write_text('{"seconds": {}, "lines": {}}')
        covered = {str(path): json.loads(cached.read_text()) for path, cached in files.items()}
        for results in covered.values():
            preload(results.get("modules", []))
        assert not set(OWN[:2]) & set(sys.modules), "the mutants would not be imported"
        gc.collect()
        gc.freeze()  # a collection in a child would copy all pages
        print(f"{len(sys.modules)} modules, {threading.active_count()} threads", flush=True)
        return covered

    def covering(self, mutant: Mutant, text: str, covered: Coverage) -> dict[str, float]:
        """The tests that cover the changed lines, as test name -> seconds.

        If there are none: the tests that cover the enclosing function, class or file.
        """
        lines = contexts(text)
        called = in_functions(text)
        for first, last in (mutant.change.lines, *mutant.change.around, (1, len(lines))):
            wanted = {lines[i - 1] for i in range(first, last + 1) if i in called}
            tests = {
                name: results["seconds"][name]
                for results in covered.values()
                for line, names in results["lines"].get(mutant.path, {}).items()
                if line in wanted
                for name in names
                if name not in self.unreliable
            }
            if tests:
                return tests
        return {}  # code that runs when the file is imported, or in isolated processes

    def select(self, mutant: Mutant, text: str, covered: Coverage) -> list[list[str]]:
        """Tests to run, best first: a group of quick ones, one within the cap, and the others."""
        stem = Path(mutant.path).stem
        folder = f"tests/{FOLDERS.get(mutant.module, mutant.module)}/"
        seen = self.covering(mutant, text, covered) | covered[DEFAULTS]["seconds"]
        tests = seen | {  # in processes that coverage cannot see
            name: seconds
            for results in covered.values()
            for name, seconds in results["seconds"].items()
            if name.startswith((folder, MISTAKES)) and name not in self.unreliable
        }

        def cost(name: str) -> tuple[bool, float]:
            file = name.partition("::")[0]
            near = 20 if stem in file else 4 if file.startswith(folder) or file in BROAD else 1
            price = (tests[name] + 0.01) / near / (1 + self.kills[name])
            return name not in seen and mutant.module != "sandbox", price

        groups: list[list[str]] = []
        left = sorted(tests, key=cost)
        limits = (QUICK_SECONDS, 2), (self.options.cap, 1000), (LONGEST, 1000)
        for seconds, most_files in limits:
            group: list[str] = []
            files: set[str] = set()
            for name in left:
                file = name.partition("::")[0]
                price = tests[name] + 0.003 + FILE_SECONDS * (file not in files)
                if price <= seconds and len(files | {file}) <= most_files:
                    group.append(name)
                    files.add(file)
                    seconds -= price
            groups.append(group)
            left = [name for name in left if name not in set(group)]
        return [group for group in groups if group] or [left[:1]]

    def run(self, mutant: Mutant, covered: Coverage) -> dict[str, Any]:
        """Result of the tests on one mutant."""
        path = Path(mutant.path)
        text = path.read_text()
        groups = self.select(mutant, text, covered)
        count = sum(map(len, groups))
        seed = self.options.seed
        record: dict[str, Any] = {"module": mutant.module, "key": mutant.key, "seed": seed}
        record |= {"tests": count} | ({"again": True} if self.options.again else {})
        outcome, began = "survived", time.monotonic()
        changed = mutant.text()
        for group in groups if count else []:
            expected = sum(covered[name.partition("::")[0]]["seconds"][name] for name in group)
            self.clock += 10
            self.failed.unlink(missing_ok=True)
            try:
                path.write_text(changed)
                os.utime(path, (self.clock, self.clock))
                # a test that hangs fails at its own deadline; after this one, nothing is known
                status, _ = self.fork(partial(test, group, self.failed), 60 + 10 * expected)
            finally:
                path.write_text(text)
            if status not in (0, 5, None):
                outcome = "killed"
                failed = self.failed.read_text() if self.failed.exists() else f"status {status}"
                record["by"] = failed.partition("\n")[0]
                self.kills[record["by"]] += 1
                break
        return record | {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}

    def sample(self, module: str) -> None:
        """Run a module's sampled mutants without a result; with --again, all surviving mutants."""
        latest = {record["key"]: record for record in read_results(self.root)}
        drawn = draw(module, self.options.seed)
        if self.options.again:
            alive = {k for k, r in latest.items() if r["outcome"] in self.options.again}
            alive -= read_triage(self.root).keys()
            most = None if self.options.again == "survived" else self.options.sample
            mutants = list(itertools.islice((m for m in drawn if m.key in alive), most))
        else:
            first = itertools.islice(drawn, self.options.sample)
            mutants = [mutant for mutant in first if mutant.key not in latest]
        if not mutants:
            return
        covered = self.coverage()
        while mutants:
            records = [self.record(mutant, covered) for mutant in mutants]
            killers = {record.get("by", "") for record in records} - {""}
            tests = [name for name in killers if "::" in name]
            self.failed.unlink(missing_ok=True)
            if tests:
                self.fork(partial(test, tests, self.failed, "--maxfail=100"), 600)
            if not self.failed.exists():
                break
            self.unreliable |= set(self.failed.read_text().splitlines())
            print(f"unreliable: {self.unreliable}", flush=True)
            names = {r["key"] for r in records if r.get("by") in self.unreliable}
            mutants = [mutant for mutant in mutants if mutant.key in names]

    def record(self, mutant: Mutant, covered: Coverage) -> dict[str, Any]:
        """Run a mutant and write its result."""
        record = self.run(mutant, covered)
        with (self.root / RESULTS).open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
        by = record.get("by", f"{record['tests']} tests")
        text = f"{mutant.path}:{mutant.line} {mutant.key.removeprefix(mutant.path).strip()}"
        print(f"{record['outcome']:9} {record['seconds']:5} s {text} [{by}]", flush=True)
        return record


def preload(names: list[str]) -> None:
    """Import libraries before forking, which saves seconds in every child process."""
    for name in names:
        if name.partition(".")[0] not in OWN:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def contexts(text: str) -> list[str]:
    """Each line with its two neighbors, to find it again after changes elsewhere in the file."""
    lines = ["", *(line.strip() for line in text.splitlines()), ""]
    return ["\n".join(lines[i - 1 : i + 2]) for i in range(1, len(lines) - 1)]


def in_functions(text: str) -> set[int]:
    """Lines that run when a function is called, not when the file is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, functions)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


def started_processes() -> str:
    """Changes when a process is started by `multiprocessing`."""
    return repr(getattr(multiprocessing.process, "_process_counter"))  # noqa: B009 - private


class Plugin:
    """Runs the chosen tests in the given order; records their times, coverage and failures."""

    def __init__(self, chosen: list[str] | None = None, cover: Any = None) -> None:
        first: dict[str, int] = {}  # place of each file: its tests run together, and share fixtures
        self.order = {
            name: (first.setdefault(name.partition("::")[0], i), i)
            for i, name in enumerate(chosen or [])
        }
        self.cover = cover
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.skipped: set[str] = set()
        self.jobs: set[str] = set()  # tests that start processes of tests.ranks

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # the first of them may start the processes of a whole file
        self.jobs = {item.nodeid for item in items if item.get_closest_marker("dist")}
        if self.order:
            items[:] = [item for item in items if item.nodeid in self.order]
            items.sort(key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.cover is not None:
            self.cover.switch_context(nodeid)
            os.environ["GAC_TEST"] = nodeid
            self.processes = started_processes()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.cover is not None and self.processes != started_processes():
            self.jobs.add(nodeid)
        if self.cover is not None and sum(self.seconds.values()) > COVERAGE_SECONDS:
            self.session.shouldstop = "enough tests of this file"

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)


def pytest_run(files: list[str], plugin: Plugin, *extra: str) -> int:
    """Run pytest in this process."""
    import pytest

    arguments = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:randomly", *extra]
    return int(pytest.main([*files, "-m", MARKERS, *arguments], plugins=[plugin]))


def test(chosen: list[str], failed: Path, *extra: str) -> int:
    """Run tests, and write the names of those that fail."""
    plugin = Plugin(chosen)
    files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
    status = pytest_run(files, plugin, *(extra or ["-x"]))
    if plugin.failed:
        failed.write_text("\n".join(plugin.failed))
    return status


def read_process(path: Path) -> Any:
    """Coverage of a process that a test started; empty if the process was killed."""
    from coverage import CoverageData, CoverageException

    data = CoverageData(str(path))
    try:
        data.read()
    except CoverageException:
        data = CoverageData(no_disk=True)
    return data


def measure(path: Path, cached: Path) -> int:
    """Record which lines each test of a file covers, in all processes.

    Failing and skipped tests are left out.
    """
    import coverage

    cover = coverage.Coverage(data_file=None, include=["gac/*", "gac_kernels/*"], config_file=False)
    plugin = Plugin(cover=cover)
    folder = Path(tempfile.mkdtemp(prefix=f"{cached.stem}.", dir=cached.parent))
    (folder / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
    settings = PROCESSES.replace("{folder}", str(folder)).replace("{tree}", str(Path.cwd()))
    (folder / "settings").write_text(settings)
    os.environ["COVERAGE_PROCESS_START"] = str(folder / "settings")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    cover.start()
    status = pytest_run([str(path)], plugin, "--timeout=60")
    cover.stop()
    good = set(plugin.seconds) - set(plugin.failed) - plugin.skipped
    lines: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    # the fork server starts before the first test, so its processes have no context
    own, jobs = cover.get_data(), plugin.jobs & good
    for data in [own, *map(read_process, folder.glob("data.*"))]:
        for file in data.measured_files():
            if not file.endswith(".py") or not Path(file).exists():  # a template, a mutant
                continue
            keys = contexts(Path(file).read_text())
            for number, tests in data.contexts_by_lineno(file).items():
                names = good & set(tests) or (jobs if data is not own else set())
                if number <= len(keys) and names:
                    lines[os.path.relpath(file)][keys[number - 1]] |= names
    new = folder / "lines.json"
    modules = [name for name in sys.modules if name.partition(".")[0] not in OWN]
    seconds = {name: plugin.seconds[name] for name in sorted(good)}
    found = {"seconds": seconds, "lines": lines, "modules": modules}
    new.write_text(json.dumps(found, default=sorted))
    new.replace(cached)
    shutil.rmtree(folder)
    return status
