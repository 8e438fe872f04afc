"""Build the sdist and the wheel, install the wheel into fresh environments, and use it there."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from gac.config import dump
from tests.tiny import tiny_config, write_tiny

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
INSPECT = """
import gac, gac_kernels, sys
from gac_kernels import build_cuda
from gac_kernels.backends import cpu
print(gac.__file__)
print((build_cuda.SOURCES / "cuda" / "launch.cu").is_file())
print(cpu.capability() if sys.argv[1] == "1" else "none")
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command without the checkout on its path; return its stdout. It must succeed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GAC_EXT")}
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def build_packages(folder: Path, mode: str) -> tuple[Path, Path]:
    """Build an sdist from the files that git does not ignore, and a wheel from only that sdist."""
    checkout = folder / "checkout"
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if names.returncode:
        pytest.skip("not a git checkout")
    for name in filter(lambda n: (ROOT / n).is_file(), names.stdout.splitlines()):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    run(sys.executable, "-c", BUILD, folder, cwd=checkout, GAC_EXT=mode)
    (sdist,) = folder.glob("gac_kernels-*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "--wheel-dir", folder, sdist, cwd=folder, GAC_EXT=mode)
    (wheel,) = folder.glob("gac_kernels-*.whl")
    return sdist, wheel


def fresh_env(folder: Path, wheel: Path) -> Path:
    """Create an environment with the wheel; a .pth file adds this environment's packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    purelib = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    # .pth files inside the added folder are not processed, which hides an editable install
    (Path(purelib) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    run(*pip, "--no-index", "--force-reinstall", wheel, cwd=folder.parent)
    return python


@pytest.mark.full(reason="builds a package")
@pytest.mark.parametrize("mode", ["0", pytest.param("1", marks=pytest.mark.release)])
def test_packages_install_and_train_outside_the_checkout(tmp_path, mode):
    _, wheel = build_packages(tmp_path, mode)
    *_, python_tag, abi, platform = wheel.stem.split("-")
    assert (python_tag, abi) == ("py3", "none")
    assert (platform == "any") == (mode == "0")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"gac/report/page.html.j2", "gac/report/page.css"} <= names
    assert {"gac/py.typed", "gac_kernels/py.typed"} <= names
    assert {"gac_kernels/csrc/cuda/launch.cu", "gac_kernels/csrc/token_math.h"} <= names
    assert ("gac_kernels/_native.so" in names) == (mode == "1")
    assert not [n for n in names if n.startswith(("tests/", "tools/", "bench/", "research/"))]

    python = fresh_env(tmp_path / "fresh", wheel)
    location, sources, capability = run(python, "-c", INSPECT, mode, cwd=tmp_path).splitlines()
    assert Path(location).is_relative_to(tmp_path / "fresh")
    assert sources == "True"
    assert capability in (("none",) if mode == "0" else ("default", "avx2", "avx512"))

    config = dump(tiny_config(write_tiny(tmp_path / "task"), tmp_path / "run", steps=2))
    config["reward"] = {"name": "format", "pattern": "[0-9].*", "full": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    output = run(python.with_name("gac"), "train", tmp_path / "run.yaml", cwd=tmp_path)
    assert "report.html" in output
    assert (tmp_path / "run" / "report.html").is_file()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


ALONE = """
import torch
import gac, gac_kernels.heads
from gac import GuidedController, Mixer
from gac_kernels import fused_gac_loss
out = fused_gac_loss(torch.randn(2, 3, 7, requires_grad=True), torch.ones(2, 3, dtype=torch.long),
                     torch.tensor([1.0, 0.0]), torch.tensor([False, True]), mu=0.5)
out.loss.backward()
mixer = Mixer(rows=4, batch=2)
mixer.observe(out.moments)
mixer.close()
print(gac.__file__)
print(0 <= GuidedController().update(out.moments.signals(), 0.1) <= 1)
"""
HIDDEN = """
import importlib.util
print(*(name for name in ("yaml", "transformers", "trl") if importlib.util.find_spec(name)))
"""


def distributions_of(*names: str) -> set[str]:
    """The installed distributions `names`, with all that they require."""
    found: set[str] = set()
    new = {*names}
    while new:
        name = new.pop()
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        found.add(name)
        plain = [text for text in requirements if "extra ==" not in text]
        new |= {re.split(r"[^\w.-]", text)[0] for text in plain} - found
    return found


def environment_of(folder: Path, *names: str) -> Path:
    """The Python of a new environment that has only the distributions `names` and their own."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name in distributions_of(*names):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = packages / top
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))
    return folder / "bin" / "python"


@pytest.mark.full(reason="builds a package")
def test_the_wheel_needs_only_torch_and_triton(tmp_path):
    _, wheel = build_packages(tmp_path, "0")
    python = environment_of(tmp_path / "alone", "torch", "triton", "numpy")
    assert run(python, "-c", HIDDEN, cwd=tmp_path).split() == []
    # without an index, pip fails if a dependency is missing
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    run(*pip, wheel, cwd=tmp_path)
    location, decided = run(python, "-c", ALONE, cwd=tmp_path).splitlines()
    assert Path(location).is_relative_to(tmp_path / "alone")
    assert decided == "True"
    (tmp_path / "run.yaml").write_text("steps: 2\n")
    command = [python.with_name("gac"), "train", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "needs the extra train (yaml): pip install 'gac-kernels[train]'" in line
