"""Tests one wheel on old and new versions of its dependencies: `make test-versions`.

    python -m tools.versions [PYTHON-TORCH ...]     # such as 3.13-2.15.0

Each environment is temporary. The kernels are first loaded with nothing but torch and Triton, then
the kernel tests and a tiny training run use the installed wheel. Results go to docs/versions.json
and docs/reference/index.md after each environment. Rows that passed with the same sources are not
repeated unless they are named, so an interrupted run can be resumed. `uv` is used if installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from tools.pages import fill

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "docs" / "versions.json", ROOT / "docs" / "reference" / "index.md"
# the losses of logits, of the linear layer and of the user on each backend, and all compiled
TESTS = [f"tests/kernels/test_{name}.py" for name in ("loss", "linear", "token_loss", "compile")]
LIGHT = """
import sys, torch, gac_kernels
assert not {"yaml", "transformers"} & set(sys.modules)
torch.manual_seed(0)
rows, weight = torch.randn(2, 5, 16), torch.randn(77, 16)
targets, is_demo = torch.randint(77, (2, 5)), torch.tensor([False, True])
gradients = []
for backend, dtype in (("native", torch.float32), ("reference", torch.float64)):
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (rows, weight)]
    out = gac_kernels.fused_linear_gac_loss(*leaves, targets, torch.tensor([1.0, 0.0]), is_demo,
                                            mu=0.5, backend=backend)
    out.loss.backward()
    gradients.append([x.grad.double() for x in leaves])
for ours, expected in zip(*gradients):
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max(), "gradients differ"
from gac_kernels.backends import cpu
print(cpu.capability())
"""
TRAIN = """
import subprocess, sys
from pathlib import Path
import yaml
from gac.config import dump
from tests.tiny import tiny_config, write_tiny
folder = Path(sys.argv[1])
config = dump(tiny_config(write_tiny(folder / "task"), folder / "run", steps=2))
config["reward"] = {"name": "format", "pattern": "[0-9].*", "full": False}
(folder / "run.yaml").write_text(yaml.safe_dump(config))
command = [Path(sys.executable).with_name("gac"), "train", folder / "run.yaml"]
subprocess.run(command, check=True, cwd=folder)
assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2
"""
PACKAGES = ("torch", "triton", "numpy", "transformers", "accelerate")
VERSIONS = f"""
import json, platform
from importlib.metadata import version
print(json.dumps({{"python": platform.python_version()}} | {{n: version(n) for n in {PACKAGES}}}))
"""


HEAD = """\
| Python | torch | Triton | NumPy | transformers | accelerate | native kernels | tests | training |
|---|---|---|---|---|---|---|---|---|"""


class Environment(NamedTuple):
    """One row of the table."""

    python: str
    torch: str
    packages: str = "newest"  # of everything else; "oldest": the lower bounds of pyproject.toml

    @property
    def name(self) -> str:
        return f"{self.python}-{self.torch}"


ENVIRONMENTS = (
    Environment("3.11", "2.11.0", "oldest"),
    Environment("3.11", "2.13.0"),
    Environment("3.12", "2.14.1"),
    Environment("3.13", "2.15.0"),
    Environment("3.14", "2.15.0"),
)


def lower_bounds() -> list[str]:
    """Pins for the oldest allowed versions, except torch and triton."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["train"]
    bounds = (re.match(r"([\w-]+)>=([\w.]+)", text) for text in requirements)
    return [f"{b[1]}=={b[2]}" for b in bounds if b and b[1] not in ("torch", "triton")]


def find_python(version: str) -> str | None:
    """An interpreter of that version on the PATH or from pyenv."""
    pyenv = Path.home() / ".pyenv" / "versions"
    for path in (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")):
        code = "import sys; sys.exit('%d.%d' % sys.version_info[:2] != sys.argv[1])"
        if path and not subprocess.run([path, "-c", code, version], capture_output=True).returncode:
            return str(path)
    return None


def run(*command: Any, cwd: Path, timeout: int = 1800, check: bool = True) -> Any:
    """Run a command outside the checkout and capture its output."""
    hidden = ("PYTHONPATH", "GAC_EXT", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"[-4000:])
    return done


def build_wheel(folder: Path) -> Path:
    """Build the wheel with its native library, from a copy of the repository in folder/sources.

    In the checkout itself, `build/` may hold deleted modules.
    """
    sources = folder / "sources"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, sources / name)
    command = (sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation")
    environment = os.environ | {"GAC_EXT": "1"}
    subprocess.run([*command, "--wheel-dir", folder, sources], check=True, env=environment)
    (wheel,) = folder.glob("*.whl")
    for package in ("gac", "gac_kernels"):  # so that the tests import the wheel
        shutil.rmtree(sources / package)
    return wheel


def fingerprint() -> str:
    """Hash of everything that is tested."""
    names = ["pyproject.toml", "setup.py", *TESTS, "tests/tiny.py", "tools/versions.py"]
    for folder, pattern in (("gac_kernels", "*.py"), ("gac", "*.py"), ("csrc", "*")):
        names += (str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob(pattern) if p.is_file())
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def test(environment: Environment, wheel: Path, folder: Path) -> dict[str, Any]:
    """Build the environment, run everything there, and return the row of the table."""
    interpreter = find_python(environment.python)
    if interpreter is None:
        return {"result": f"not run: no Python {environment.python} was found"}
    start, env = time.monotonic(), folder / "env"
    python = env / "bin" / "python"
    uv, install = shutil.which("uv"), tuple[str | Path, ...]()
    if uv:
        run(uv, "venv", "--python", interpreter, env, cwd=folder)
        install = (uv, "pip", "install", "--python", python)
    else:
        run(interpreter, "-m", "venv", env, cwd=folder)
        install = (python, "-m", "pip", "install", "-qq", "--no-cache-dir")
    run(*install, f"torch=={environment.torch}", "triton", cwd=folder)
    run(*install, "--no-deps", wheel, cwd=folder)
    capability = run(python, "-c", LIGHT, cwd=folder).stdout.strip()
    pins = lower_bounds() if environment.packages == "oldest" else []
    tools = ("pytest", "pytest-timeout", "hypothesis", "ninja", f"torch=={environment.torch}")
    run(*install, f"gac-kernels[train] @ {wheel.as_uri()}", *pins, *tools, cwd=folder)
    row = json.loads(run(python, "-c", VERSIONS, cwd=folder).stdout)
    checkout = wheel.parent / "sources"
    options = "-q -p no:cacheprovider --tb=short --show-capture=no --disable-warnings"
    selected = (*options.split(), "-o", "addopts=--strict-markers", "-m", "not gpu and not slow")
    tests = run(python, "-m", "pytest", *selected, *TESTS, cwd=checkout, check=False)
    summary = tests.stdout.strip().splitlines()[-1] if tests.stdout.strip() else tests.stderr[-200:]
    counts = re.findall(r"\d+ (?:failed|passed|skipped|errors?)", summary)
    row |= {"tests": ", ".join(counts) or summary, "native": capability}
    if tests.returncode:
        print(f"pytest: exit code {tests.returncode}", file=sys.stderr)
        print(tests.stdout[-4000:], tests.stderr[-1000:], file=sys.stderr)
    code = f"import sys; sys.path.insert(0, {str(checkout)!r})\n{TRAIN}"
    train = run(python, "-c", code, folder, cwd=folder, check=False)
    if train.returncode:
        print(train.stdout[-2000:], train.stderr[-2000:], file=sys.stderr)
    row["training"] = "passed" if train.returncode == 0 else "failed"
    good = tests.returncode == 0 and train.returncode == 0
    return row | {"result": "passed" if good else "failed", "seconds": time.monotonic() - start}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The table of docs/reference/index.md."""
    lines = [HEAD]
    for environment in ENVIRONMENTS:
        row = rows.get(environment.name, {"result": "not run"})
        if "tests" in row:
            names = ("python", *PACKAGES, "native", "tests", "training")
            cells = [str(row[name]) for name in names]
        else:
            cells = [environment.python, environment.torch, *["-"] * 5, row["result"], "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(names: list[str]) -> int:
    """Run the command; return its exit code."""
    known = {environment.name: environment for environment in ENVIRONMENTS}
    if unknown := set(names) - set(known):
        print(f"unknown environment {', '.join(sorted(unknown))}: use {', '.join(known)}")
        return 2
    rows = json.loads(DATA.read_text()) if DATA.exists() else {}
    failed, sources = False, fingerprint()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # deletes the environment
    with tempfile.TemporaryDirectory(prefix="gac-versions-") as temporary:
        wheel = build_wheel(Path(temporary))
        for name in names or known:
            row = rows.get(name, {})
            if not names and (row.get("result"), row.get("sources")) == ("passed", sources):
                print(f"{name}: passed before, with the same sources", flush=True)
                continue
            folder = Path(temporary) / name
            folder.mkdir()
            try:
                rows[name] = test(known[name], wheel, folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr)
                rows[name] = {"result": "failed: the environment could not be built or used"}
            shutil.rmtree(folder)  # gigabytes
            failed |= rows[name]["result"].startswith("failed")
            rows[name]["sources"] = sources
            print(f"{name}: {rows[name]['result']}", flush=True)
            DATA.write_text(json.dumps(rows, indent=1) + "\n")
            fill(PAGE, "versions", table(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
