"""No program can escape the sandbox, stop its server or fake a pass.

Every attempt runs with all layers, and again without Landlock and namespaces, where seccomp alone
must contain it. It also runs with all layers off, where it must succeed; otherwise it would prove
nothing.
"""

import platform
import sys
from dataclasses import dataclass

import pytest

from gac.sandbox.pool import JudgeSpec, Pool, Program, RunResult
from tests.sandbox import escapes
from tests.sandbox.fakes import TESTS
from tests.sandbox.fakes import fakes as all_fakes
from tests.sandbox.sandboxes import patch_server

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="system call numbers are for x86-64"),
]

WITHOUT_LANDLOCK = """
from sandbox import confine
def absent(): raise OSError(38, "Function not implemented")
confine.landlock_abi = absent
"""
WITHOUT_SECCOMP = """
from sandbox import confine
confine.install_filter = lambda program: None
confine.verify_confinement = lambda *a: None
"""
SETUPS = {"all layers": "", "seccomp alone": WITHOUT_LANDLOCK}


def patched_pool(monkeypatch, patch, **options):
    """A pool whose server first runs `patch`; with a patch, namespaces are off."""
    pool = Pool(**options)
    if patch:
        patch_server(monkeypatch, patch)
    pool.start()
    monkeypatch.undo()
    return pool


@pytest.fixture(scope="module", params=SETUPS)
def pool(request):
    with pytest.MonkeyPatch.context() as monkeypatch:
        pool = patched_pool(monkeypatch, SETUPS[request.param], workers=4)
    assert ("landlock" in pool.start().active) <= (request.param == "all layers")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def unprotected_pool():
    with pytest.MonkeyPatch.context() as monkeypatch:
        pool = patched_pool(monkeypatch, WITHOUT_LANDLOCK + WITHOUT_SECCOMP, workers=4)
    yield pool
    pool.close()


def run(pool: Pool, text: str, cpu_seconds=1, output=1 << 20) -> RunResult:
    return pool.run(Program(text), b"input\n", cpu_seconds, 256, output)


def test_landlock_alone_refuses_files(monkeypatch):
    pool = patched_pool(monkeypatch, WITHOUT_SECCOMP, workers=1)
    if "landlock" not in pool.start().active:
        pytest.skip("this kernel has no Landlock")
    text = "import os\ntry: os.open('/etc/passwd', 0)\nexcept OSError as e: print(e.errno)"
    assert run(pool, text).stdout == b"13\n"  # EACCES; seccomp's is EPERM
    pool.close()


def still_grades(pool: Pool) -> bool:
    good = pool.check(Program("def add(a, b): return a + b"), JudgeSpec(TESTS), 5, 256)
    return good.passed == (True,) * len(TESTS)


# --- the system -----------------------------------------------------------------------------------


@dataclass
class Report:
    """Parsed output of a script from `escapes.SYSTEM`."""

    refused: dict[str, str]
    done: list[str]
    broken: list[str]
    ended: bool


def parse_report(outcome: RunResult) -> Report:
    lines = outcome.stdout.decode().splitlines()
    refused = {}
    for line in lines:
        if line.startswith("refused "):
            _, code, label = line.split(" ", 2)
            refused[label] = code
    starting = {
        word: [line for line in lines if line.startswith(word)] for word in ("DONE", "broken")
    }
    return Report(refused, starting["DONE"], starting["broken"], lines[-1:] == ["END"])


@pytest.mark.parametrize("name", escapes.SYSTEM)
def test_no_system_attempt_succeeds(pool, name):
    outcome = run(pool, escapes.script(name), cpu_seconds=5)
    report = parse_report(outcome)
    assert report.ended, f"stopped early: {outcome}"
    assert not report.done
    assert not report.broken
    assert set(report.refused) == set(escapes.operations(name))


def test_attempts_succeed_without_the_layers(unprotected_pool):
    outcomes = unprotected_pool.map(
        lambda name: run(unprotected_pool, escapes.script(name), cpu_seconds=5),
        list(escapes.SYSTEM),
    )
    missed = []
    for name, outcome in zip(escapes.SYSTEM, outcomes, strict=True):
        done = " ".join(parse_report(outcome).done)
        missed += [op for op in escapes.operations(name, proven=True) if f"DONE {op} " not in done]
    assert not missed


def test_there_are_enough_attempts():
    assert len(escapes.SYSTEM) >= 28
    assert len(escapes.MISBEHAVING) >= 10
    assert len(all_fakes()) >= 33
    assert sum(len(escapes.operations(name)) for name in escapes.SYSTEM) >= 190


# --- odd programs ---------------------------------------------------------------------------------


def test_misbehaving_programs_are_contained(pool):
    outcomes = pool.map(lambda odd: run(pool, odd[0]), list(escapes.MISBEHAVING.values()))
    assert not [
        (name, outcome.ending, outcome.stdout[:40])
        for (name, (_, endings)), outcome in zip(escapes.MISBEHAVING.items(), outcomes, strict=True)
        if outcome.ending not in endings or not outcome.stdout.startswith(b"END")
    ]
    assert still_grades(pool)


# --- fakes ----------------------------------------------------------------------------------------

_PLAIN = """
namespace = {{"__name__": "solution"}}
exec({program!r}, namespace)
print("END", flush=True)
for test in {tests!r}:
    exec(test, namespace)
"""


def grade_naively(pool: Pool, text: str) -> tuple[bool, bool]:
    """Return (program ran to its end, program passes) when it shares a process with the tests."""
    text = text.replace("#END", "print('END', flush=True)")
    outcome = run(pool, _PLAIN.format(program=text, tests=TESTS))
    return b"END" in outcome.stdout, (outcome.ending, outcome.status) == ("ended", 0)


def test_no_fake_passes(pool):
    fakes = all_fakes()
    outcomes = pool.map(
        lambda p: pool.check(p, JudgeSpec(TESTS), 1, 256),
        [Program(text) for text, _ in fakes.values()],
    )
    assert not [name for name, outcome in zip(fakes, outcomes, strict=True) if all(outcome.passed)]
    assert not [outcome for outcome in outcomes if outcome.row_problem]  # that would stop training
    assert still_grades(pool)


def test_fakes_fool_a_grader_in_the_same_process(unprotected_pool):
    fakes = all_fakes()
    grades = unprotected_pool.map(
        lambda fake: grade_naively(unprotected_pool, fake[0]), list(fakes.values())
    )
    assert not [
        name for name, (ended, _) in zip(fakes, grades, strict=True) if not ended
    ]  # a program that breaks before its trick would prove nothing
    fooled = {name for name, (_, passed) in zip(fakes, grades, strict=True) if passed}
    assert fooled == {name for name, (_, fools) in fakes.items() if fools}
    assert len(fooled) >= 16
