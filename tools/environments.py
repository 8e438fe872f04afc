"""Runs each adapter's tests against the real package, in a separate environment.

    python -m tools.environments [NAME ...]

Each file in requirements/integrations defines one environment; its name starts with the package
name. Each line of trl.txt defines one too: the project's own packages with another TRL, such as
trl-1.15.0. Environments are built under .venv/integrations and rebuilt when their file changes. The
table of TRL versions in docs/integrations/trl.md is rewritten once all of them have been run. The
exit code is 1 if any test fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv/integrations"
PAGE = ROOT / "docs/integrations/trl.md"
FILES = {path.stem: path for path in sorted((ROOT / "requirements/integrations").glob("*.txt"))}
TRL = {
    line.replace("==", "-"): line
    for line in FILES.pop("trl").read_text().splitlines()
    if line.startswith("trl==")
}
RESULT = "tests.json"  # of the last run
HOOK = "from gac_kernels.heads.trl.head import missing_hook; print(missing_hook() is None)"


def build(name: str) -> tuple[Path, Path | None]:
    """Build the environment `name` unless it is up to date.

    Returns:
        Its Python interpreter, and a folder of packages that it prefers or None.
    """
    folder = ENVIRONMENTS / name
    stamp = folder / "requirements.sha256"
    pins = [TRL[name]] if name in TRL else FILES[name].read_text().splitlines()
    digest = hashlib.sha256("\n".join(pins).encode()).hexdigest()
    python = Path(sys.executable) if name in TRL else folder / "bin/python"
    packages = folder if name in TRL else None
    if stamp.is_file() and stamp.read_text() == digest:
        return python, packages
    print(f"building {folder}", flush=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--no-deps"]
    if packages is not None:
        subprocess.run([*pip, "--upgrade", "--target", str(folder), *pins], check=True)
    else:
        venv.create(folder, clear=True, with_pip=True)
        torch = next(line for line in pins if line.startswith("torch=="))
        # torch first, with its exact version: a range would pull in gigabytes of CUDA packages
        for arguments in ([torch], ["-r", str(FILES[name])]):
            # --no-deps: the file pins every package, and some of their version bounds conflict
            subprocess.run([*pip, *arguments], check=True)
    stamp.write_text(digest)
    return python, packages


def run(name: str) -> dict[str, int]:
    """Run the tests of the environment `name`; count those that passed, failed and were skipped."""
    package = name.split("-")[0]
    python, packages = build(name)
    paths = [str(ROOT)] if packages is None else [str(packages), str(ROOT)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # import the package first: if that failed, pytest would skip its tests
    if subprocess.run(
        [python, "-c", f"import {package}"], cwd=ROOT, env=env, check=False
    ).returncode:
        return {"passed": 0, "skipped": 0, "failed": 1}
    folders = [ROOT / "tests" / name for name in ("heads", "integrations")]
    tests = [test for x in folders for test in sorted(x.glob(f"test_{package}*.py"))]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-W", "ignore", f"--junitxml={report}"]
        code = subprocess.run([*command, *tests], cwd=ROOT, env=env, check=False).returncode
        if not report.is_file():
            return {"passed": 0, "skipped": 0, "failed": 1}
        suite = ElementTree.parse(report).getroot()[0]
    number, skipped, *bad = (
        int(suite.attrib[key]) for key in ("tests", "skipped", "failures", "errors")
    )
    failed = sum(bad) or int(code != 0)
    return {"passed": number - skipped - sum(bad), "skipped": skipped, "failed": failed}


def has_fused_head(name: str) -> bool:
    """Whether TRL in this environment has a head that we can replace."""
    env = {**os.environ, "PYTHONPATH": f"{ENVIRONMENTS / name}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-c", HOOK]
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return output.stdout.split()[-1] == "True"


def write_table(results: dict[str, dict[str, int]]) -> None:
    """Write the table of TRL versions into the docs."""
    lines = [
        "| TRL | our head and fused loss | tests passed | skipped | failed |",
        "|---|---|---|---|---|",
    ]
    versions: dict[str, list[str]] = {}  # by result
    for name, count in results.items():
        head = "yes" if has_fused_head(name) else "no"
        row = f"| {head} | {count['passed']} | {count['skipped']} | {count['failed']} |"
        versions.setdefault(row, []).append(name.removeprefix("trl-"))
    lines += [f"| {', '.join(names)} {row}" for row, names in versions.items()]
    table = "\n".join(lines) + "\n"
    pattern = "(?<=<!-- trl versions -->\\n).*?(?=<!-- /trl versions -->)"
    PAGE.write_text(re.sub(pattern, table, PAGE.read_text(), flags=re.S))


def main(names: list[str]) -> int:
    """Test the environments of these names, or all."""
    known = [*TRL, *FILES]
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"unknown environment {', '.join(unknown)}: use {', '.join(known)}")
        return 2
    results = {name: run(name) for name in names or known}
    for name in set(results) & set(TRL):
        (ENVIRONMENTS / name / RESULT).write_text(json.dumps(results[name]))
    files = {name: ENVIRONMENTS / name / RESULT for name in TRL}
    if all(path.is_file() for path in files.values()):
        write_table({name: json.loads(path.read_text()) for name, path in files.items()})
    failed = [name for name, count in results.items() if count["failed"]]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
