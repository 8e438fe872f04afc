"""A head imports the kernels and its trainer, and nothing of `gac` or of another package."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.stand_ins import modules

ROOT = Path(__file__).resolve().parents[2]
HEADS = "gac_kernels.heads"
# These find their trainer when they are applied, so that every process can import them.
ALONE = ("gac_kernels", *(f"{HEADS}.{name}" for name in ("patch", "trl", "verl", "prime_rl")))
ON_TRANSFORMERS = tuple(f"{HEADS}.{name}" for name in ("transformers", "openrlhf", "skyrl"))
ON_TRL = (f"{HEADS}.trl.grpo", f"{HEADS}.trl.async_grpo")
TRAINERS = {"accelerate", "datasets", "math_verify", "matplotlib", "peft", "trl"}
OTHERS = TRAINERS | {"jinja2", "numpy", "psutil", "transformers", "yaml"}
CODE = """
import importlib, sys
sys.modules.update(dict.fromkeys({blocked!r}))  # None: as if the package were not installed
for name in {names!r}:
    importlib.import_module(name)
print(*sorted({{name.partition(".")[0] for name, module in sys.modules.items() if module}}))
"""


def loaded(names: tuple[str, ...], blocked: set[str]) -> set[str]:
    """The packages that a process has loaded after it has imported some modules."""
    code = CODE.format(names=names, blocked=blocked)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {*done.stdout.split()}
    assert "gac_kernels" in found
    return found


def test_every_head_is_listed() -> None:
    files = {path.stem for path in (ROOT / "gac_kernels" / "heads").iterdir()}
    listed = {name.split(".")[2] for name in (*ALONE, *ON_TRANSFORMERS) if name.count(".") > 1}
    # two need their trainer at the import; lazy_head is what OpenRLHF's and SkyRL's heads share
    elsewhere = {"axolotl", "verl_fused", "lazy_head"}
    assert files - {"__init__", "__pycache__"} == listed | elsewhere


def test_heads_that_need_torch_alone() -> None:
    assert not loaded(ALONE, {"gac", *OTHERS}) & {"gac", *OTHERS}


def test_heads_on_transformers_need_no_other_trainer() -> None:
    pytest.importorskip("transformers")
    assert not loaded(ON_TRANSFORMERS, {"gac", *TRAINERS}) & {"gac", *TRAINERS}


def test_trainers_on_trl_load_nothing_of_gac() -> None:
    pytest.importorskip("trl", minversion="1.16")
    found = loaded(ON_TRL, set())
    assert "trl" in found
    assert "gac" not in found


def test_the_plugin_of_axolotl_loads_nothing_of_gac() -> None:
    """Axolotl is not installed here: its base class is stood in for."""
    pytest.importorskip("transformers")
    base = {"axolotl.integrations.base": {"BasePlugin": object}}
    with modules(base, f"{HEADS}.axolotl") as adapter:
        assert adapter.GACPlugin.__module__ == f"{HEADS}.axolotl"
        names = {getattr(value, "__module__", "") or "" for value in vars(adapter).values()}
    assert not [name for name in names if name.partition(".")[0] == "gac"]


def test_the_exports_of_the_head_for_trl() -> None:
    pytest.importorskip("trl", minversion="1.16")
    from gac_kernels.heads import trl

    for name in trl.__all__:
        assert getattr(trl, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'gac_kernels\.heads\.trl' has no attribute 'Fused'"):
        _ = trl.Fused
