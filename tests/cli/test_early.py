"""A misspelled key is reported before anything large is imported."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gac.config.early import check_names, declared_fields
from gac.errors import ConfigError
from gac.evaluation.config import EvalConfig
from gac.fields import hints_of
from gac.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
ASK = """
import resource, sys
from gac.cli import main
code = main(["train", "run.yaml", *sys.argv[1:]])
used = resource.getrusage(resource.RUSAGE_SELF)
print(code, "torch" in sys.modules, used.ru_utime + used.ru_stime)
"""


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("optim: {lrr: 1}", [], "run.yaml: optim.lrr: unknown key 'lrr'; did you mean 'lr'?"),
        ("steps: 2", ["stpes=3"], "--set stpes: unknown key 'stpes'; did you mean 'steps'?"),
        ("lr: 1", [], "run.yaml: lr: unknown key; did you mean 'optim.lr'?"),
        ("steps: 2", ["eval.data.promts=x"], "--set eval.data.promts: unknown key 'promts'"),
    ],
)
def test_it_takes_less_than_a_second_of_cpu_time(tmp_path, text, overrides, message):
    (tmp_path / "run.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", ASK, "--set", "seed=1", *overrides],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    code, torch_loaded, seconds = done.stdout.split()
    assert done.stderr.startswith(f"gac: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert code == "2"
    assert torch_loaded == "False"
    assert float(seconds) < 1


def sections(cls):
    """A dataclass and those of its fields that are dataclasses."""
    yield cls
    for hint in hints_of(cls).values():
        if dataclasses.is_dataclass(hint):
            yield from sections(hint)


@pytest.mark.parametrize("cls", [*sections(TrainConfig), *sections(EvalConfig)])
def test_the_source_declares_the_fields_of_the_class(cls):
    names = [field.name for field in dataclasses.fields(cls)]
    assert list(declared_fields(cls.__module__, cls.__name__)) == names


def test_keys_that_depend_on_a_value_are_left_to_the_loader():
    cls = ("gac.train_config", "TrainConfig")
    check_names(cls, {"method": {"name": "gac", "any": 1}, "eval": {"tasks": {"any": {}}}})
    check_names(cls, {"mu": 1})  # the loader knows that it is `method.mu`
    with pytest.raises(ConfigError, match="did you mean 'guards'"):
        check_names(cls, {"guard": {}})
