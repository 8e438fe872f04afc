"""`gac doctor` without a GPU, without the native library, with an unsupported trainer."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gac_kernels
from gac.cli import main
from gac_kernels import backends, doctor


def test_the_report_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 100 for line in lines)
    assert main(["doctor", "--json"]) == 0
    sections = json.loads(text := capsys.readouterr().out)
    assert not any(x.endswith(doctor.ABSENT) for x in lines if not x.startswith("versions "))
    assert sections["versions"]["torch"] == torch.__version__
    assert text.startswith('{\n "versions"')
    assert sections["self-test"]["reference on cpu"].startswith("passed")
    assert sections["backends"]["reference on cpu"] == "available"
    assert lines[-1] == f"trainers   {doctor.ABSENT}: " + ", ".join(
        name for name, state in sections["trainers"].items() if state == doctor.ABSENT
    )
    if not torch.cuda.is_available():
        assert sections["devices"]["gpu"] == "none that torch can use"


def test_without_the_native_library(tmp_path: Path) -> None:
    """A copy of the package whose library is deleted says so in one line, and still works."""
    package = Path(gac_kernels.__file__).parent
    shutil.copytree(package, tmp_path / "gac_kernels", ignore=shutil.ignore_patterns("*.so"))
    command = [sys.executable, "-m", "gac_kernels.doctor"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    (line,) = [x for x in result.stdout.splitlines() if "native on cpu" in x]
    assert line.split(": ", 1)[1] != "available"
    assert "auto on cpu: reference for float32" in result.stdout


def test_an_unsupported_trainer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, installed, expected in [
        ("trl", "1.9.0", "1.9.0 is not supported: install 1.15 or later"),
        ("trl", "1.15", "1.15, supported"),
        ("trl", "2.0", "2.0, supported"),
        ("verl", "1.0", "1.0 is not supported: install 0.9 or later, below 1"),
        ("verl", "0.9.1", "0.9.1, supported"),
        ("axolotl", "0.18", "0.18 is not supported: install 0.19 or later"),
        ("openrlhf", "0.10", "0.10 is not supported: install 0.11 or later"),
        ("skyrl", "0.2.1", "0.2.1 is not supported: install 0.3 or later"),
        ("prime-rl", "0.6", "0.6 is not supported: install 0.7 or later"),
        ("ms-swift", "4.5", "4.5 is not supported: install 4.6 or later"),
        ("trinity-rft", "0.5", "0.5 is not supported: install 0.6 or later"),
    ]:
        monkeypatch.setattr(doctor, "version", lambda package, found=installed: found)
        assert doctor._support(package, *doctor.TRAINERS[package]) == expected


def test_a_wrong_backend_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = doctor.fused_linear_gac_loss

    def wrong(*args: Any, backend: str, mu: float, **keywords: Any) -> Any:
        return own(*args, backend=backend, mu=mu if backend == "reference" else 0.51, **keywords)

    monkeypatch.setattr(doctor, "fused_linear_gac_loss", wrong)
    native = backends.unavailable("native", torch.device("cpu"), torch.float32)
    if native:
        pytest.skip(native)
    assert doctor.main([]) == 1
    assert "native on cpu: FAILED: relative error" in capsys.readouterr().out


def test_the_first_use_logs_its_backend_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._log_first_use.cache_clear()
    with caplog.at_level(logging.INFO, "gac_kernels"):
        for _ in range(3):
            module = backends.select_backend("auto", torch.device("cpu"), torch.float32)
    assert caplog.messages == [f"using the {backends.name_of(module)} backend on cpu"]
