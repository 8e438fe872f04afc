"""A minimal install (torch and triton): imports, commands and errors for extras."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gac.errors import EXTRAS, MissingExtra, explain_missing_extra
from tests.project.test_architecture import FLOORS, WITHOUT_A_TRAINER

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EVERY_EXTRA = set().union(*EXTRAS.values())
# Makes packages look as if they were not installed.
BLOCKER = """
import sys
BLOCKED = {blocked!r}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocker())
"""
IMPORTS = """
import importlib, pkgutil
import gac, gac_kernels, gac_kernels.inspect
from gac import ControllerConfig, GuidedController, Mixer, mu_star, mu_star_biased
for name in ("control", "methods"):
    package = importlib.import_module(f"gac.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"gac.{name}."):
        importlib.import_module(module.name)
Mixer(rows=4, batch=2)
for module in pkgutil.walk_packages(gac_kernels.__path__, "gac_kernels."):
    # C libraries, and heads, which need their trainer: tests/heads/test_imports.py
    if not module.name.startswith(tuple(f"gac_kernels.{x}" for x in ("_native", "_cuda", "heads"))):
        importlib.import_module(module.name)
import torch
from gac_kernels import fused_gac_loss
out = fused_gac_loss(torch.randn(2, 3, 7, requires_grad=True), torch.ones(2, 3, dtype=torch.long),
                     torch.tensor([1.0, 0.0]), torch.tensor([False, True]), mu=0.5)
out.loss.backward()
print(GuidedController(ControllerConfig()).update(out.moments.signals(), 0.1))
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


KERNELS = """
import sys
import torch
before = {*sys.modules}
from gac_kernels import fused_gac_loss
after = {*sys.modules} - before
names = {name.partition(".")[0] for name in after} - sys.stdlib_module_names
print(len(after), torch.cuda.is_initialized(), *names)
"""


def test_importing_the_kernels_loads_few_modules_and_needs_only_torch():
    run = [sys.executable, "-c", KERNELS]
    count, *rest = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert rest == ["False", "gac_kernels"]
    assert int(count) < 25


def run_without(blocked: set[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process in which the packages `blocked` are not installed."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


COMMANDS = """
from gac.cli import main
for command in sys.argv[1:]:
    print(main(command.split()))
"""


def test_what_needs_only_torch_and_triton_and_what_names_its_extra():
    examples = ROOT / "examples"
    commands = f"train {examples}/gsm8k.yaml", f"eval {examples}/eval/gsm8k.yaml", "methods gac"
    blocked = EVERY_EXTRA - {"numpy"}  # triton imports it
    done = run_without(blocked, IMPORTS + COMMANDS, *commands)
    assert done.returncode == 0, done.stderr
    mu, loaded, *codes = done.stdout.splitlines()
    assert 0 <= float(mu) <= 1
    assert not set(loaded.split()) & blocked
    pattern = r"gac: .*extra train \(\w+\): pip install 'gac-kernels\[train\]'"
    lines = done.stderr.splitlines()
    assert len(lines) == 3, done.stderr
    assert all(re.fullmatch(pattern, line) for line in lines), done.stderr
    assert codes == ["2", "2", "2"]


ROOMS_OF = """
import sys
{statement}
print("rooms", *sorted({{name.split(".")[1] for name in sys.modules if name.startswith("gac.")}}))
"""


def rooms_after(statement: str, blocked: set[str]) -> set[str]:
    """The rooms of gac that a new process has loaded after `statement`."""
    done = run_without(blocked, ROOMS_OF.format(statement=statement))
    assert done.returncode == 0, done.stderr
    return {*done.stdout.splitlines()[-1].split()[1:]}


def test_importing_gac_loads_none_of_its_rooms():
    assert rooms_after("import gac", EVERY_EXTRA) == set()


@pytest.mark.parametrize("name", ["Mixer", "GuidedController"])
def test_mu_is_decided_without_a_trainer(name: str):
    """Neither our trainer nor the packages of its extra are needed."""
    allowed = {*FLOORS["words"], *FLOORS["mixing"]} - {"commands", "config", "rows"}
    assert rooms_after(f"from gac import {name}; {name}", EVERY_EXTRA) <= allowed


@pytest.mark.slow(reason="imports another trainer")
@pytest.mark.parametrize("name", ["trl", "verl", "trinity", "swift"])
def test_an_adapter_loads_no_trainer_of_ours(name: str):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    rooms = rooms_after(f"import gac.integrations.{name}", set())
    assert "mixer" in rooms
    assert rooms <= WITHOUT_A_TRAINER


def test_extras_match_pyproject():
    def names(requirements: list[str]) -> set[str]:
        listed = {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in requirements}
        return {"yaml" if name == "pyyaml" else name for name in listed}

    assert names(PROJECT["dependencies"]) == {"torch", "triton", "numpy"}
    for extra, packages in EXTRAS.items():
        listed = names(PROJECT["optional-dependencies"][extra])
        assert listed <= packages
        # the others are required by transformers and datasets themselves
        assert packages - listed <= {"tokenizers", "huggingface_hub", "pyarrow"}


def test_a_missing_package_outside_the_extras_raises_module_not_found():
    raised = pytest.raises(MissingExtra, match=r"this needs the extra lora \(peft\): pip install")
    with raised, explain_missing_extra("this"):
        raise ModuleNotFoundError("No module named 'peft.utils'", name="peft.utils")
    with pytest.raises(ModuleNotFoundError, match="no_such"), explain_missing_extra("this"):
        import no_such  # noqa: F401 - intentionally missing
