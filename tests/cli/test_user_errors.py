"""Every user error is one line that names the key and says what to do."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gac import cli
from gac.errors import ConfigError, RunError, user_message, value_errors_as
from gac.models.pretrained import check_source
from tests.tiny import write_tiny

ROOT = Path(cli.__file__).parents[1]
GSM8K = str(ROOT / "examples" / "gsm8k.yaml")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("task"))
    (folder / "torn.jsonl").write_text('{"prompt": "1"\n')
    (folder / "named.jsonl").write_text('{"question": "1", "answer": "2"}\n')
    (folder / "truncated.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (folder / "a-file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "no-tokenizer").mkdir()
    shutil.copy(folder / "init" / "config.json", folder / "no-tokenizer")
    shutil.copytree(folder / "init", folder / "corrupt")
    (folder / "corrupt" / "model.safetensors").write_bytes(b"not a header")
    return folder


def error_line(capsys, *arguments: str, code: int = cli.USAGE) -> str:
    """Run a command that fails, and return its single line on stderr."""
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (text,) = captured.err.splitlines()
    assert text.startswith("gac: ")
    return text


def train_command(task: Path, tmp_path: Path, *changes: str) -> list[str]:
    """A valid `train` command, followed by `changes`."""
    valid = {
        "out": tmp_path / "run",
        "model.path": task / "init",
        "model.random_init": "true",
        "data.prompts": task / "prompts.jsonl",
        "data.demos": task / "demos.jsonl",
        "reward": "tests.tiny:digit_reward",
        "steps": 1,
    }
    config = tmp_path / "run.yaml"
    config.write_text("")
    return ["train", str(config), "--set", *(f"{k}={v}" for k, v in valid.items()), *changes]


INVALID = [
    ("model.path=", "model.path is empty: give a folder"),
    ("model.path={task}/nowhere", "model.path='{task}/nowhere': no such folder"),
    ("model.path=a/b/c", "model.path='a/b/c': no such folder"),
    ("model.path={task}/a-file", "is a file: give the folder"),
    ("model.path={task}/empty", "has no tokenizer (tokenizer.json): set model.tokenizer"),
    ("model.path={task}/no-tokenizer", "has no tokenizer (tokenizer.json): set"),
    ("model.tokenizer={task}/empty", "model.tokenizer='{task}/empty': the folder has no"),
    ("model.random_init=false", "has no weights (model.safetensors): give a folder"),
    ("model.attention=nonsense", "cannot be loaded: Specified `attn_implementation"),
    ("data.prompts=null", "data.prompts is not set: give a .jsonl, .json"),
    ("data.prompts=no.jsonl", "data.prompts='no.jsonl': no such file"),
    ("data.prompts=$NO_FOLDER/no.jsonl", "data.prompts='$NO_FOLDER/no.jsonl': $NO_FOLDER is not"),
    ("data.demos=no.jsonl", "data.demos='no.jsonl': no such file"),
    ("data.prompts={task}/torn.jsonl", "torn.jsonl, line 1: not valid"),
    ("data.prompts={task}/truncated.jsonl.gz", "the compressed file is corrupt or truncated"),
    ("data.prompts={task}/named.jsonl", "fields are answer, question: set prompt_field"),
    ("data.demos={task}/named.jsonl", "field 'solution': is missing; "),
    ("data.answer_field=gold", "set answer_field (null: no answers)"),
    ("data.answer_pattern=((", "answer_pattern='((' is not a valid regular expression"),
    ("out={task}/a-file/run", "out='{task}/a-file/run'"),
    ("reward=mth", "unknown reward 'mth'; did you mean 'math'?"),
    ("rollouts.stop=[abc]", "stop='abc' is 0 tokens: use a string"),
    ("method=grop", "did you mean 'grpo'?"),
    ("report_to=[nope]", "report_to='nope': use names from aim, "),
]


@pytest.mark.parametrize(("change", "message"), INVALID)
def test_train(task, tmp_path, capsys, change, message):
    text = error_line(capsys, *train_command(task, tmp_path, change.format(task=task)))
    assert message.format(task=task) in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_corrupt_weights(task, tmp_path, capsys):
    changes = [f"model.path={task / 'corrupt'}", "model.random_init=false"]
    text = error_line(capsys, *train_command(task, tmp_path, *changes))
    assert "the weights are corrupt" in text and "download them again" in text


def test_eval(task, capsys):
    model = ["--set", f"model.path={task / 'init'}", "model.random_init=true"]
    assert "model.path is empty" in error_line(capsys, "eval")
    assert "data.prompts is not set" in error_line(capsys, "eval", *model)
    data = [*model, "reward=tests.tiny:digit_reward", "settings.max_completion_length=2"]
    text = error_line(capsys, "eval", *data, "settings.data.prompts=no.jsonl")
    assert "data.prompts='no.jsonl': no such file" in text
    data += [f"settings.data.prompts={task / 'eval.jsonl'}", "settings.data.limit=2"]
    text = error_line(capsys, "eval", *data, "settings.split_field=kind")
    assert "split_field='kind'" in text and "'0'" in text and "id, " in text


def test_other_commands(task, tmp_path, capsys):
    file = str(task / "a-file")
    export = ["export", str(tmp_path), str(tmp_path / "out")]
    assert "has no config.yaml" in error_line(capsys, *export)
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    assert "no intact checkpoint" in error_line(capsys, *export)
    assert "saved step" in error_line(capsys, "replay", str(tmp_path))
    assert "no runs found" in error_line(capsys, "report", str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    text = error_line(capsys, "report", str(tmp_path), "--out", file)
    assert "cannot be written (File exists)" in text and "--out=" in text
    for option in ("jobs", "steps", "seeds"):
        assert f"--{option}=0: use a number >= 1" in error_line(capsys, "demo", f"--{option}", "0")
    assert "did you mean 'grpo'" in error_line(capsys, "demo", "--methods", "grop")
    assert "--out=" in error_line(capsys, "demo", "--out", f"{file}/x")
    assert "unknown name '../x'" in error_line(capsys, "methods", "../x")


class Hub(http.server.BaseHTTPRequestHandler):
    """Responds as the Hub does for a gated model and for a missing one."""

    def do_GET(self) -> None:
        responses = {"gated": (403, "GatedRepo"), "absent": (404, "RepoNotFound")}
        status, code = responses.get(self.path.split("/")[4], (501, "NotSupported"))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Suppress request logging."""


def test_hub_models(task, tmp_path, capsys, monkeypatch):
    from huggingface_hub import constants, hf_api

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hf_api.api, "endpoint", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        text = error_line(capsys, *train_command(task, tmp_path, "model.path=firm/gated"))
        assert "model.path='firm/gated' is a gated model: accept its terms" in text
        text = error_line(capsys, *train_command(task, tmp_path, "model.path=firm/absent"))
        assert "no model of that name on the Hub" in text
        check_source("model.path", "firm/mirrored")  # any other response is not an error
    finally:
        server.shutdown()
        server.server_close()
    # the server is down now, as on a machine without a network
    text = error_line(capsys, *train_command(task, tmp_path, "model.path=firm/model"))
    assert "cannot be reached" in text and "give the folder of a model" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = error_line(capsys, *train_command(task, tmp_path, "model.path=firm/model"))
    assert "HF_HUB_OFFLINE forbids" in text


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gac.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_missing_model_path_from_the_shell(tmp_path):
    """From the shell: one line and exit code 2."""
    done = shell("train", GSM8K, "--set", f"out={tmp_path}")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gac: model.path is empty: give a folder")
    assert done.stderr.count("\n") == 1


def test_internal_errors_keep_their_traceback(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("gac.report.find_folders", fail)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["report", str(tmp_path)])


def test_gac_debug_enables_tracebacks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GAC_DEBUG", "1")
    assert cli.main(["--debug", "report", str(tmp_path)]) == cli.USAGE
    *trace, last = capsys.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback") and "no runs found" in last
    monkeypatch.setenv("GAC_DEBUG", "0")
    assert "no runs found" in error_line(capsys, "report", str(tmp_path))


def test_user_message_and_exit_code():
    assert user_message(RunError("two\n  lines")) == ("two lines", 1)
    assert user_message(ConfigError("x")) == ("x", 2)
    assert user_message(OSError(28, "No space left on device")) is not None
    denied = PermissionError(13, "Permission denied", "a/b")
    assert user_message(denied) == ("a/b: Permission denied", 2)
    assert user_message(ValueError("x")) is None and user_message(ConnectionError("x")) is None


def test_setup_errors_become_user_errors(capsys):
    with pytest.raises(ConfigError, match="key: a=1"), value_errors_as(ConfigError, "key"):
        raise ValueError("a=1")
    with pytest.raises(RunError, match="^b$"), value_errors_as(ConfigError, "key"):
        raise RunError("b")
