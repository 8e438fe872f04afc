"""A minimal install (torch, triton, numpy, PyYAML): imports, commands and errors for extras."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gac.errors import EXTRAS, MissingExtra, explain_missing_extra

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Makes every package from an extra look as if it were not installed.
BLOCKER = f"""
import sys
BLOCKED = {set().union(*EXTRAS.values())!r}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
IMPORTS = """
import importlib, pkgutil
import gac, gac_kernels, gac_kernels.inspect
from gac import ControllerConfig, GuidedController, mu_star, mu_star_biased
for name in ("config", "control", "data", "errors", "methods", "report", "rewards"):
    package = importlib.import_module(f"gac.{name}")
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"gac.{name}."):
        importlib.import_module(module.name)
import gac.mixer
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


def run_without_extras(
    code: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


COMMANDS = """
from gac.cli import main
for command in sys.argv[1:]:
    print(main(command.split()))
"""


def test_what_needs_only_four_packages_and_what_names_its_extra():
    examples = ROOT / "examples"
    commands = f"train {examples}/gsm8k.yaml", f"eval {examples}/eval/gsm8k.yaml", "methods gac"
    done = run_without_extras(IMPORTS + COMMANDS, *commands)
    assert done.returncode == 0, done.stderr
    mu, loaded, *codes, method = done.stdout.split("\n", 4)
    assert 0 <= float(mu) <= 1
    assert not set(loaded.split()) & set().union(*EXTRAS.values())
    pattern = r"gac: .*extra train \(\w+\): pip install 'gac-kernels\[train\]'"
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(re.fullmatch(pattern, line) for line in lines), done.stderr
    assert codes == ["2", "2"]
    assert method.endswith("\n0\n")
    assert "method.ema_decay" in method


def test_extras_match_pyproject():
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in requirements}

    assert names(PROJECT["dependencies"]) == {"torch", "triton", "numpy", "pyyaml"}
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
