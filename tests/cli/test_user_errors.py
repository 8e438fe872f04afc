"""Errors of the Hub, exit codes; see also test_mistakes.py and test_cli_commands.py."""

import http.server
import threading
from pathlib import Path

import pytest

from gac import cli
from gac.errors import ConfigError, RunError, user_message, value_errors_as
from gac.models.source import check_source


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
    assert "cannot be reached" in text
    assert "give the folder of a model" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = error_line(capsys, *train_command(task, tmp_path, "model.path=firm/model"))
    assert "HF_HUB_OFFLINE forbids" in text


def test_user_message_and_exit_code():
    assert user_message(RunError("two\n  lines")) == ("two lines", 1)
    assert user_message(ConfigError("x")) == ("x", 2)
    assert user_message(OSError(28, "No space left on device")) == (
        "no space left on device: free some space and rerun the command",
        1,
    )
    denied = PermissionError(13, "Permission denied", "a/b")
    assert user_message(denied) == ("a/b: Permission denied", 2)
    assert user_message(ValueError("x")) is None
    assert user_message(ConnectionError("x")) is None


def test_setup_errors_become_user_errors():
    for key, message in (("key", "^key: a=1$"), ("", "^a=1$")):
        with pytest.raises(ConfigError, match=message), value_errors_as(ConfigError, key):
            raise ValueError("a=1")
    with pytest.raises(RunError, match="^b$"), value_errors_as(ConfigError, "key"):
        raise RunError("b")
