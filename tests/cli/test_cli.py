"""The command line from a user's point of view: help, one-line errors, exit codes, reports."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gac import __version__, cli
from gac.config import load
from gac.methods import METHODS
from gac.train_config import TrainConfig
from tests.report.test_report_values import write_run
from tests.waiting import wait_until

ROOT = Path(cli.__file__).parents[1]


def test_top_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main(["--help"])
    text = capsys.readouterr().out
    commands = (f"\n    {c} " for c in ("train", "eval", "report", "methods", "demo", "study"))
    assert all(part in text for part in ("adaptive mixing weight.\n", cli.EXAMPLES, *commands))


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"gac {__version__}\n"


LARGE = {"torch", "transformers", "numpy", "matplotlib", "yaml"}


COMMANDS = ("", "demo ", "study ", "report ", "export ", "replay ")


@pytest.mark.parametrize("arguments", [*(f"{name}--help" for name in COMMANDS), "trian"])
def test_help_and_usage_errors_import_no_large_package(arguments):
    code = "import sys; from gac.cli import main\ntry: main(sys.argv[1:])\n"
    code += "except SystemExit: print(*sys.modules, file=sys.stderr)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "usage: gac" in done.stdout + done.stderr
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "gac.cli" in loaded
    assert not loaded & LARGE


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("train", ["out: text = runs/gac", "optim.lr: float", "model.path: text"]),
        ("eval", ["eval.samples: int", "model.path: text"]),
        ("study", []),
    ],
)
def test_command_help_documents_every_configuration_key(capsys, command, keys):
    """Its usage has the file before --set, after which it would be another KEY=VALUE."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    usage = text.splitlines()[0]
    assert usage.index("CONFIG.yaml") < usage.index("--set")
    assert "--set KEY=VALUE" in text
    for key in keys:
        assert f"\n{key}" in text
    undocumented = [
        line
        for line, following in zip(text.splitlines(), text.splitlines()[1:], strict=False)
        if line[:1].isalpha() and " = " in line and not following.startswith("    ")
    ]
    assert undocumented == []


def test_methods_lists_all_and_explains_one(capsys):
    assert cli.main(["methods"]) == cli.OK
    text = capsys.readouterr().out
    for name, method in METHODS.items():
        assert f"\n  {name} " in text
        assert method.family in text
    assert cli.main(["methods", "gac"]) == cli.OK
    assert (
        "method.ema_decay: float = 0.99 (only with ema=state or ema=literal)\n    "
        in capsys.readouterr().out
    )


def test_report_prints_the_tables_and_writes_the_page(tmp_path, capsys):
    config, evals = {"method": {"name": "constant"}}, [{"step": 11, "accuracy": 0.25}]
    columns = {"mu": [0.5] * 11, "kl": [0.1] * 11, "reward_mean": [0.2] * 11}
    runs = [write_run(tmp_path / name, config, columns, evals) for name in ("one", "two")]
    assert cli.main(["report", os.path.relpath(runs[0]), str(runs[1])]) == cli.OK
    text = capsys.readouterr().out
    # the folder common to both
    assert "25.0" in text
    assert str(tmp_path / "report.html") in text
    assert (tmp_path / "plots" / "overview.png").is_file()
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "other")]) == cli.OK
    assert (tmp_path / "other" / "report.html").is_file()


def test_set_takes_one_or_several_and_may_be_repeated():
    options = cli.make_parser().parse_args(
        ["train", "a.yaml", "--set", "steps=1", "seed=2", "--set", "method=grpo", "--no-resume"]
    )
    assert options.set == ["steps=1", "seed=2", "method=grpo"]
    assert options.resume is False
    config = load(TrainConfig, {}, options.set)
    assert (config.steps, config.seed, config.method) == (1, 2, METHODS["grpo"]())


def test_interrupt_exits_with_130_and_says_how_to_resume(tmp_path):
    # the configuration is a named pipe: the command blocks on opening it, where a real SIGINT
    # reaches it
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    code = "import signal, sys; from gac.cli import main; import gac.train_config\n"
    # shells start background jobs, and thus their children, with SIGINT ignored
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "sys.exit(main(sys.argv[1:]))"
    writer = []

    def command_is_reading():
        try:
            writer.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            assert error.errno == errno.ENXIO  # no reader yet
        return bool(writer)

    with subprocess.Popen(
        [sys.executable, "-c", code, "train", str(pipe)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(command_is_reading, "the command to open its configuration")
        process.send_signal(signal.SIGINT)
        os.close(writer[0])  # ends `read`, which a signal just before it does not
        _, error = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED
    assert re.fullmatch(r"gac: interrupted.*rerun.*resume\n", error)
