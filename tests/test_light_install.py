"""A minimal install (torch, triton, numpy, PyYAML): what can be imported, what works, and which
errors name an extra.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gac.errors import EXTRAS, MissingExtra, extras_named

ROOT = Path(__file__).resolve().parents[1]
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
ROOMS = """
import importlib, pkgutil
import gac, gac_kernels, gac_kernels.inspect
from gac import ControllerConfig, GuidedController, mu_star, mu_star_biased
for name in ("config", "control", "data", "errors", "methods", "mixer", "report", "rewards"):
    room = importlib.import_module(f"gac.{name}")
    for found in pkgutil.walk_packages(getattr(room, "__path__", []), f"gac.{name}."):
        if found.name != "gac.training.feed":  # used only by the trainer
            importlib.import_module(found.name)
for found in pkgutil.walk_packages(gac_kernels.__path__, "gac_kernels."):
    if found.name != "gac_kernels._native":  # a torch operator library, not a Python module
        importlib.import_module(found.name)
import torch
from gac_kernels import fused_gac_loss
out = fused_gac_loss(torch.randn(2, 3, 7, requires_grad=True), torch.ones(2, 3, dtype=torch.long),
                     torch.tensor([1.0, 0.0]), torch.tensor([False, True]))
out.loss.backward()
print(GuidedController(ControllerConfig()).update(out.moments.signals(), 0.1))
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def light(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_kernels_controller_and_methods_need_four_packages():
    done = light(ROOMS)
    assert done.returncode == 0, done.stderr
    mu, loaded = done.stdout.splitlines()
    assert 0 <= float(mu) <= 1
    assert not set(loaded.split()) & set().union(*EXTRAS.values())


def test_commands_without_the_extra_name_it_in_one_line(tmp_path):
    command = "from gac.cli import main\nsys.exit(main(sys.argv[1:]))"
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    for arguments in (["train", str(ROOT / "examples" / "gsm8k.yaml")], ["eval", "--help"]):
        done = light(command, *arguments, **cache)
        assert done.returncode == 2
        assert re.fullmatch(
            r"gac: this command needs the extra train \(\w+\): pip install 'gac\[train\]'\n",
            done.stderr,
        )
    done = light(command, "methods", "gac", **cache)
    assert done.returncode == 0 and "method.ema_decay" in done.stdout


def test_the_extras_are_those_of_the_project():
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in requirements}

    assert names(PROJECT["dependencies"]) == {"torch", "triton", "numpy", "pyyaml"}
    for extra, packages in EXTRAS.items():
        brought = names(PROJECT["optional-dependencies"][extra])
        assert brought <= packages
        # the rest are required by transformers itself
        assert packages - brought <= {"tokenizers", "huggingface_hub"}


def test_a_missing_package_of_no_extra_stays_what_it_is():
    said = pytest.raises(MissingExtra, match=r"this needs the extra lora \(peft\): pip install")
    with said, extras_named("this"):
        raise ModuleNotFoundError("No module named 'peft.utils'", name="peft.utils")
    with pytest.raises(ModuleNotFoundError, match="no_such"), extras_named("this"):
        import no_such  # noqa: F401 - intentionally missing
