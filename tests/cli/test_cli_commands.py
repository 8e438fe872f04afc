"""What each command of `gac` passes on, prints and returns, without its work."""

import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gac import cli
from gac.config import load_early
from gac.demo import DEMO_METHODS, REAL_METHODS
from gac.errors import ConfigError

SUITE = "gac.evaluation.suite"
CHOSEN = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "2000",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Undo what commands change in this process."""
    caplog.set_level(logging.WARNING, "gac")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in (*CHOSEN, "GAC_DEBUG", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def fake(monkeypatch: Any, path: str, result: Any = None) -> list[tuple[Any, ...]]:
    """Replace a function; returns the list of its calls' arguments."""
    calls: list[tuple[Any, ...]] = []

    def function(*args: Any, **options: Any) -> Any:
        calls.append((*args, *options.values()))
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(path, function)
    return calls


def load_unchecked(name: str, *arguments: Any) -> tuple[Any, list[str]]:
    return load_early(name, *arguments), []


def fake_training(monkeypatch: Any, error: Exception | None = None) -> list[Any]:
    """Replace the training and the report; returns the list of what is done."""
    done: list[Any] = []

    def train(config: Any, resume: bool) -> str:
        done.append((config.steps, config.out, resume))
        if error:
            raise error
        return "a/run"

    monkeypatch.setattr("gac.training.check.load_checked", load_unchecked)
    monkeypatch.setattr("gac.training.trainer.train", train)
    monkeypatch.setattr(
        "gac.report.write_report", lambda *report: done.append(report) or "a/report.html"
    )
    return done


@pytest.mark.parametrize("main_process", [True, False])
def test_train(tmp_path: Path, monkeypatch: Any, capsys: Any, main_process: bool) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("steps: 3\nout: here\n")
    done = fake_training(monkeypatch)
    monkeypatch.setenv("RANK", "0" if main_process else "1")
    assert cli.main(["train", "run.yaml", *([] if main_process else ["--no-resume"])]) == cli.OK
    reports = [(["a/run"], "a/run")] if main_process else []
    assert done == [(3, "here", main_process), *reports]
    printed = (
        "accuracy: not measured; set eval.data.prompts\ntime: 0.0 min in 0 steps\nrun: a/run\n"
        "next: gac report a/run\nRun: a/run\nReport: a/report.html\n"
    )
    assert capsys.readouterr().out == (printed if main_process else "")
    assert sys.path[-1] == str(tmp_path)  # where rewards are found
    assert logging.getLogger("gac").isEnabledFor(logging.INFO) == main_process
    assert not logging.getLogger("urllib3.connectionpool").isEnabledFor(logging.WARNING)


def test_user_errors_of_a_run_are_one_line_and_bugs_are_not(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("steps: 5\n")
    fake_training(monkeypatch, ConfigError("steps=5: not supported"))
    assert cli.main(["train", str(config)]) == cli.USAGE
    assert capsys.readouterr().err == "gac: steps=5: not supported\n"
    fake_training(monkeypatch, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["train", str(config)])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_eval(tmp_path: Path, monkeypatch: Any, capsys: Any, rank: str) -> None:
    os.environ["RANK"] = rank
    run_suite = fake(monkeypatch, f"{SUITE}.run_suite", "results")
    monkeypatch.setattr("gac.training.check.load_checked", load_unchecked)
    evaluate = fake(monkeypatch, f"{SUITE}.evaluate_single", {"accuracy": 0.5})
    monkeypatch.setattr("gac.evaluation.table.results_table", lambda results: f"table of {results}")
    assert cli.main(["eval", "--set", "model.path=x", "--set", "seed=4"]) == cli.OK
    ((single, _),) = evaluate
    assert (single.model.path, single.seed) == ("x", 4)
    assert capsys.readouterr().out == ('{\n  "accuracy": 0.5\n}\n' if rank == "0" else "")
    config = tmp_path / "eval.yaml"
    config.write_text("tasks: {a: {data: {prompts: x.jsonl}}}\n")
    assert cli.main(["eval", str(config), "--against", "old"]) == cli.OK
    ((suite, against),) = run_suite
    assert [*suite.tasks] == ["a"]
    assert against == Path("old")
    assert len(evaluate) == 1
    assert capsys.readouterr().out == ("table of results\n" if rank == "0" else "")
    assert sys.path[-1] == str(tmp_path)
    assert cli.main(["eval", "--against", "old"]) == cli.OK
    assert evaluate[-1][1] == Path("old")
    assert logging.getLogger("gac").isEnabledFor(logging.INFO) == (rank == "0")


@pytest.mark.parametrize(
    ("options", "step", "changed"),
    [
        ([], None, {}),
        (["--checkpoint", "12", "--push-to-hub", "a/b"], 12, {"repository": "a/b"}),
        (["--checkpoint", "best", "--adapters"], "best", {"adapters": True}),
        (["--gguf"], None, {"gguf": True}),
    ],
)
def test_export(
    monkeypatch: Any, capsys: Any, options: list[str], step: Any, changed: dict[str, Any]
) -> None:
    calls = []

    def export_run(*args: Any, **keywords: Any) -> str:
        calls.append((*args, keywords))
        return "a/checkpoint"

    monkeypatch.setattr("gac.training.export.export_run", export_run)
    assert cli.main(["export", "a", "b", *options]) == cli.OK
    expected = {"adapters": False, "repository": None, "gguf": False} | changed
    assert calls == [(Path("a"), Path("b"), step, expected)]
    assert capsys.readouterr().out == "a/checkpoint -> b\n"


def test_export_of_an_unknown_step(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", "a", "b", "--checkpoint", "last"])
    assert "expected a step number or 'best', got 'last'" in capsys.readouterr().err


def test_methods(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["methods", "dr-grpo"]) == cli.OK
    text = capsys.readouterr().out
    assert text.startswith("dr-grpo: ")
    assert text.endswith("\n\nIt has no hyperparameters.\n")
    assert "  " not in text
    assert text.count("\n") == 3
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("command", "function", "expected", "code"),
    [
        (
            "demo",
            ".demo.run.run_demo",
            (Path("runs/demo"), [*DEMO_METHODS], range(1), 160, None),
            1,
        ),
        (
            "demo --out x --methods sft gac --seeds 2 --steps 3 --jobs 4",
            ".demo.run.run_demo",
            (Path("x"), ["sft", "gac"], range(2), 3, 4),
            1,
        ),
        (
            "demo --real",
            ".demo.real.run_real",
            (Path("runs/real"), None, REAL_METHODS, 16, None),
            1,
        ),
        (
            "demo --methods sft --steps 3 --jobs 1 --out x --real m",
            ".demo.real.run_real",
            (Path("x"), "m", ["sft"], 3, 1),
            1,
        ),
        ("replay a/b", ".training.replay.replay", (Path("a/b"),), 0),
        ("doctor", "_kernels.doctor.main", ([],), 1),
        ("doctor --json", "_kernels.doctor.main", (["--json"],), 1),
    ],
)
def test_arguments(
    monkeypatch: Any,
    capsys: Any,
    command: str,
    function: str,
    expected: tuple[Any, ...],
    code: int,
) -> None:
    calls = fake(monkeypatch, f"gac{function}", 1)
    assert cli.main(command.split()) == code
    assert calls == [expected]
    assert capsys.readouterr().out == ("" if code else "1\n")


@pytest.mark.parametrize(
    ("variable", "arguments", "shown"),
    [
        (None, ["methods", "x"], False),
        ("", ["methods", "x"], False),
        ("0", ["methods", "x"], False),
        ("1", ["methods", "x"], True),
        (None, ["--debug", "methods", "x"], True),
        (None, ["methods", "x", "--debug"], True),
    ],
)
def test_tracebacks(capsys: Any, variable: str | None, arguments: list[str], shown: bool) -> None:
    if variable is not None:
        os.environ["GAC_DEBUG"] = variable
    assert cli.main(arguments) == cli.USAGE
    error = capsys.readouterr().err
    assert error.startswith("Traceback") == shown
    assert "gac: method.name: unknown name 'x'" in error


def test_interrupts_and_closed_pipes(monkeypatch: Any, capsys: Any) -> None:
    place = rf" \({re.escape(__file__)}, line \d+\)"  # of the function that `fake` returns
    for error, code, message in (
        (KeyboardInterrupt(), 130, f"interrupted{place}; rerun the command to resume"),
        (KeyboardInterrupt("at 3"), 130, "interrupted: at 3; rerun the command to resume"),
        (SystemExit("a"), 1, rf"the code called sys\.exit\('a'\){place}"),
    ):
        fake(monkeypatch, "gac.methods.listing.methods_table", error)
        assert cli.main(["methods"]) == code
        assert re.fullmatch(f"gac: {message}\n", capsys.readouterr().err)
    fake(monkeypatch, "gac.methods.listing.methods_table", BrokenPipeError())
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: writer))
    assert cli.main(["methods"]) == cli.OK
    os.write(writer, b"to the null device, at exit")
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_threads_and_progress_bars_are_set_unless_the_user_chose(
    monkeypatch: Any, capsys: Any
) -> None:
    """Threads spin briefly, and there are no progress bars, because `capsys` is not a terminal."""
    fake(monkeypatch, "gac.methods.listing.methods_table", "")
    cli.main(["methods"])
    assert {name: os.environ.pop(name) for name in CHOSEN} == CHOSEN
    own = {"OMP_WAIT_POLICY": "ACTIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    os.environ |= own
    cli.main(["methods"])
    assert {name: os.environ[name] for name in CHOSEN if name in os.environ} == own


def test_only_the_first_process_of_a_job_reports_an_error(monkeypatch: Any, capsys: Any) -> None:
    """Once per message and attempt; without a launcher's store, every process reports."""
    counts: dict[str, int] = {}
    stores: list[Any] = []

    class Store:
        def __init__(self, address: str, port: int, timeout: Any) -> None:
            stores.append((address, port, timeout.total_seconds()))

        def add(self, key: str, amount: int) -> int:
            counts[key] = counts.get(key, 0) + amount
            return counts[key]

    def reports(name: str = "x") -> bool:
        assert cli.main(["methods", name]) == cli.USAGE
        return bool(capsys.readouterr().err)

    monkeypatch.setattr("torch.distributed.TCPStore", Store)
    os.environ["WORLD_SIZE"] = "2"
    os.environ.pop("MASTER_PORT", None)
    assert reports()
    assert reports()
    assert not stores
    os.environ |= {"MASTER_ADDR": "host", "MASTER_PORT": "29"}
    assert [reports(), reports(), reports("y"), reports("y")] == [True, False, True, False]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert [reports(), reports()] == [True, False]
    assert set(stores) == {("host", 29, 5.0)}
    os.environ["WORLD_SIZE"] = "1"
    assert reports()
    assert reports()
    os.environ["WORLD_SIZE"] = "2"
    fake(monkeypatch, "torch.distributed.TCPStore", RuntimeError("the launcher has exited"))
    assert reports()
    assert reports()
