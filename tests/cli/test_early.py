"""Mistakes that are answered before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gac.demo.project import create_project

PROGRAM = """
import sys
from gac import cli
code = cli.main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""
MISTAKES = {
    "stpes=3": "did you mean 'steps'?",
    "optim.betas=[0.9,1.2]": "betas=(0.9, 1.2): use two numbers in [0, 1)",
    "optim.warmup_steps=-5": "warmup_steps=-5: use a number >= 0",
    "eval.every=-1": "every=-1: use a number >= 0",
    "out=": "out='': use the name of a folder",
    "seed=1180591620717411303424": "seed=1180591620717411303424: use a whole number",
    "data.prompts=none.jsonl": "data.prompts='none.jsonl': no such file or folder",
    "eval.data.prompts=none.jsonl": "eval.data.prompts='none.jsonl': no such file or folder",
    "reward=reward.py:nothing": "reward.py has no 'nothing'",
    "reward=reward.py:test_reward": "TypeError: test_reward() takes 0 positional arguments",
    "reward=exits.py:reward": "it called sys.exit(3)",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        create_project(folder.relative_to(folder) / "first")
    (folder / "first" / "exits.py").write_text("def reward(completion, example):\n    exit(3)\n")
    return folder


def run(folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_without_torch(project, mistake):
    result = run(project, "train", "first/run.yaml", "--set", mistake)
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert MISTAKES[mistake] in result.stderr and result.stderr.count("\n") == 1
    assert not (project / "first" / "run").exists()


def test_paths_that_exist_next_to_the_configuration(project):
    result = run(project / "first", "train", "run.yaml")
    assert result.returncode == 2
    assert f"run the command in {project}\n" in result.stderr


def test_check_trains_nothing(project):
    result = run(project, "check", "first/run.yaml")
    assert result.returncode == 0 and result.stdout.endswith("All checks passed.\nFalse\n")
    assert "data.prompts: 80 rows\n" in result.stdout
    assert "reward: 1.0 for the demonstration of the first row\n" in result.stdout
