"""Every user error gives one line that names the key and says what to do."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gac import cli
from gac.errors import ConfigError, RunError, refusals_are, verdict
from gac.models.pretrained import check_source
from tests.tiny import write_tiny

ROOT = Path(cli.__file__).parents[1]
GSM8K = str(ROOT / "examples" / "gsm8k.yaml")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("task"))
    (folder / "torn.jsonl").write_text('{"prompt": "1"\n')
    (folder / "named.jsonl").write_text('{"question": "1", "answer": "2"}\n')
    (folder / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (folder / "a-file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "no-tokenizer").mkdir()
    (folder / "no-tokenizer" / "config.json").write_bytes(
        (folder / "init" / "config.json").read_bytes()
    )
    broken = folder / "broken"
    broken.mkdir()
    for file in (folder / "init").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not a header")
    return folder


def line(capsys, *arguments: str, code: int = cli.USAGE) -> str:
    """Run a command that fails, and return its single line on stderr."""
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (text,) = captured.err.splitlines()
    assert text.startswith("gac: ")
    return text


def train(task: Path, tmp_path: Path, *changes: str) -> list[str]:
    """A valid `train` command, followed by `changes`."""
    plain = {
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
    return ["train", str(config), "--set", *(f"{k}={v}" for k, v in plain.items()), *changes]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.path=", "model.path is empty: give a folder with a transformers model"),
        ("model.path={task}/nowhere", "model.path='{task}/nowhere': there is no such folder"),
        ("model.path=a/b/c", "model.path='a/b/c': there is no such folder"),
        ("model.path={task}/a-file", "is a file: give the folder"),
        ("model.path={task}/empty", "has no tokenizer (tokenizer.json): set model.tokenizer"),
        ("model.path={task}/no-tokenizer", "has no tokenizer (tokenizer.json): set"),
        ("model.tokenizer={task}/empty", "model.tokenizer='{task}/empty': the folder has no"),
        ("model.random_init=false", "has no weights (model.safetensors): give a folder"),
        ("model.attention=nonsense", "cannot be loaded: Specified `attn_implementation"),
        ("data.prompts=null", "data.prompts is not set: name a .jsonl file"),
        ("data.prompts=no.jsonl", "data.prompts='no.jsonl': there is no such file or folder"),
        (
            "data.prompts=$NO_FOLDER/no.jsonl",
            "data.prompts='$NO_FOLDER/no.jsonl': $NO_FOLDER is not",
        ),
        ("data.demos=no.jsonl", "data.demos='no.jsonl': there is no such file or folder"),
        ("data.prompts={task}/torn.jsonl", "torn.jsonl, line 1: not valid JSON"),
        ("data.prompts={task}/cut.jsonl.gz", "the compressed file is damaged or cut short"),
        ("data.prompts={task}/named.jsonl", "the row has answer, question: set prompt_field"),
        ("data.demos={task}/named.jsonl", "field 'solution': is missing; "),
        ("data.answer_field=gold", "set answer_field (null: no answers)"),
        ("data.answer_pattern=((", "is no regular expression"),
        ("out={task}/a-file/run", "the run directory cannot be written (Not a directory)"),
        ("reward=mth", "unknown reward 'mth'; did you mean 'math'?"),
        ("rollouts.stop=[abc]", "stop='abc' is 0 tokens: use a text of one token"),
        ("method=grop", "did you mean 'grpo'?"),
        ("mixed_precision=bf17", "mixed_precision='bf17': use no or bf16"),
    ],
)
def test_train(task, tmp_path, capsys, change, words):
    text = line(capsys, *train(task, tmp_path, change.format(task=task)))
    assert words.format(task=task) in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_damaged_weights(task, tmp_path, capsys):
    change = [f"model.path={task / 'broken'}", "model.random_init=false"]
    text = line(capsys, *train(task, tmp_path, *change))
    assert "the weights are damaged" in text and "download them again" in text


def test_eval(task, capsys):
    model = ["--set", f"model.path={task / 'init'}", "model.random_init=true"]
    assert "model.path is empty" in line(capsys, "eval")
    assert "data.prompts is not set" in line(capsys, "eval", *model)
    data = [*model, "reward=tests.tiny:digit_reward", "settings.max_new_tokens=2"]
    assert "there is no such file" in line(capsys, "eval", *data, "settings.data.prompts=no.jsonl")
    data += [f"settings.data.prompts={task / 'eval.jsonl'}", "settings.data.limit=2"]
    text = line(capsys, "eval", *data, "settings.split_field=kind")
    assert "split_field='kind' is not among the fields of row '0': id, " in text


def test_other_commands(task, tmp_path, capsys):
    file = str(task / "a-file")
    assert "has no config.yaml" in line(capsys, "export", str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    assert "no intact checkpoint" in line(capsys, "export", str(tmp_path), str(tmp_path / "out"))
    assert "holds no kept step" in line(capsys, "replay", str(tmp_path))
    assert "no run here" in line(capsys, "report", str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    text = line(capsys, "report", str(tmp_path), "--out", file)
    assert "cannot be written (File exists)" in text and "--out=" in text
    for option in ("jobs", "steps", "seeds"):
        assert f"--{option}=0: use a number >= 1" in line(capsys, "demo", f"--{option}", "0")
    assert "did you mean 'grpo'" in line(capsys, "demo", "--methods", "grop")
    assert "--out=" in line(capsys, "demo", "--out", f"{file}/x")
    assert "is no method's name" in line(capsys, "methods", "../x")


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does for a gated model and for a missing one."""

    def do_GET(self) -> None:
        answers = {"gated": (403, "GatedRepo"), "absent": (404, "RepoNotFound")}
        status, code = answers.get(self.path.split("/")[4], (501, "NotSupported"))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Suppress request logging."""


def test_names_of_the_hub(task, tmp_path, capsys, monkeypatch):
    from huggingface_hub import constants, hf_api

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hf_api.api, "endpoint", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        text = line(capsys, *train(task, tmp_path, "model.path=firm/gated"))
        assert "model.path='firm/gated' is a gated model: accept its terms" in text
        text = line(capsys, *train(task, tmp_path, "model.path=firm/absent"))
        assert "no model of that name on the hub" in text
        check_source("model.path", "firm/mirrored")  # any other answer is not an error
    finally:
        server.shutdown()
        server.server_close()
    # the server is down now, as on a machine without a network
    text = line(capsys, *train(task, tmp_path, "model.path=firm/model"))
    assert "cannot be reached" in text and "give the folder of a model" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = line(capsys, *train(task, tmp_path, "model.path=firm/model"))
    assert "HF_HUB_OFFLINE forbids" in text


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gac.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_first_command_for_ones_own_model(tmp_path):
    """From the shell: one line and exit code 2; --debug adds the traceback."""
    done = shell("train", GSM8K, "--set", f"out={tmp_path}", "--debug")
    assert done.returncode == 2 and done.stdout == ""
    *trace, last = done.stderr.splitlines()
    assert last.startswith("gac: model.path is empty: give a folder")
    assert trace[0].startswith("Traceback")
    done = shell("train", GSM8K, "--set", f"out={tmp_path}")
    assert (done.returncode, done.stderr) == (2, f"{last}\n")


def test_defects_keep_their_traceback(tmp_path, monkeypatch):
    def defect(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("gac.report.find_folders", defect)
    with pytest.raises(ValueError, match="a defect"):
        cli.main(["report", str(tmp_path)])


def test_the_environment_asks_for_tracebacks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GAC_DEBUG", "1")
    assert cli.main(["--debug", "report", str(tmp_path)]) == cli.USAGE
    assert capsys.readouterr().err.startswith("Traceback")
    monkeypatch.setenv("GAC_DEBUG", "0")
    assert line(capsys, "report", str(tmp_path)).endswith("in it or below it)")


def test_verdicts():
    assert verdict(RunError("two\n  lines")) == ("two lines", 1)
    assert verdict(ConfigError("x")) == ("x", 2)
    assert verdict(OSError(28, "No space left on device")) is not None
    assert verdict(PermissionError(13, "Permission denied", "a/b")) == (
        "a/b: Permission denied",
        2,
    )
    assert verdict(ValueError("x")) is None and verdict(ConnectionError("x")) is None


def test_refusals_of_set_up_become_the_users(capsys):
    with pytest.raises(ConfigError, match="key: a=1"), refusals_are(ConfigError, "key"):
        raise ValueError("a=1")
    with pytest.raises(RunError, match="^b$"), refusals_are(ConfigError, "key"):
        raise RunError("b")


def test_help_is_fast_once_it_was_made(tmp_path):
    """The text is cached per state of the sources; a cached call imports no large package."""
    code = "import json, sys; from gac.cli import main\ntry: main(sys.argv[1:])\n"
    code += "except SystemExit: pass\nprint(json.dumps([*sys.modules]), file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    for command in (["train", "--help"], ["methods"], ["methods", "gac"]):
        texts, modules = [], []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", code, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            texts.append(done.stdout)
            modules.append(set(json.loads(done.stderr.splitlines()[-1])))
        assert texts[0] == texts[1] and texts[0]
        assert "torch" in modules[0] and "torch" not in modules[1]
