"""Checks everything that a release consists of: `make release-check`.

    python -m tools.release_check [--quick]      # --quick: without the matrix of versions

Prints one line per check: passed, FAILED, or skipped with the reason. The exit code is 1 if any
check failed. The checks that use auditwheel, actionlint or zizmor are skipped where these are not
installed.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

from tools import versions

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = re.compile(r'the following platform tag:\s*"(\w+)"')


class Skipped(Exception):
    """A check that cannot run here; the message says why."""


def command(*parts: str | Path) -> str:
    """Run a command in the checkout; return its output, or raise RuntimeError with it."""
    done = subprocess.run(list(map(str, parts)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, parts))}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def tool(name: str) -> str:
    """Path of an installed tool."""
    local = Path(sys.executable).with_name(name)
    path = str(local) if local.exists() else shutil.which(name)
    if path is None:
        raise Skipped(f"{name} is not installed")
    return path


def metadata(wheel: Path) -> str:
    """Check name, version, requirements, extras, files and tag of the wheel; return its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        headers = email.message_from_bytes(archive.read(name))
        names = set(archive.namelist())
    assert (headers["Name"], headers["Version"]) == (project["name"], project["version"]), headers
    assert headers["Requires-Python"] == ">=3.11", headers["Requires-Python"]
    required = headers.get_all("Requires-Dist") or []
    assert "torch>=2.11" in required, required
    extras = set(headers.get_all("Provides-Extra") or [])
    assert {"train", "trl", "eval"} <= extras, extras
    assert not {"dev", "peers", "oracle"} & extras, extras
    assert {"gac/py.typed", "gac_kernels/py.typed", "gac_kernels/_native.so"} <= names
    assert wheel.stem.split("-")[2:4] == ["py3", "none"], wheel.name
    changelog = (ROOT / "CHANGELOG.md").read_text()
    section = re.search(rf"^## (\[?{re.escape(headers['Version'])}\]?|Unreleased)", changelog, re.M)
    assert section, f"CHANGELOG.md has no section for {headers['Version']}"
    return wheel.name


def platform_tag(wheel: Path) -> str:
    """The oldest Linux that the native library runs on."""
    found = PLATFORM.search(" ".join(command(tool("auditwheel"), "show", wheel).split()))
    assert found, "auditwheel names no tag"
    assert found[1].startswith("manylinux"), "auditwheel names no manylinux tag"
    return f"{found[1]} when built here; .github/workflows/release.yml builds for manylinux_2_28"


def run_tests(*arguments: str) -> str:
    """Run pytest; return its summary."""
    return command(sys.executable, "-m", "pytest", "-q", *arguments).strip().splitlines()[-1]


def packages() -> str:
    """Check that the sdist and its wheel install into new environments, and that training works."""
    return run_tests("-m", "release or slow", "tests/project/test_packages.py")


def imports() -> str:
    """Check that importing the kernels is quick and needs only torch; type-check a user's file."""
    return run_tests("tests/project/test_light_install.py", "tests/project/test_typing.py")


def workflows() -> str:
    """Check that the workflows are valid, and safe as far as linters can tell."""
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    done, missing = [], []
    for name, options in (("actionlint", ()), ("zizmor", ("--offline",))):
        try:
            command(tool(name), *options, *files)
            done.append(name)
        except Skipped:
            missing.append(name)
    if not done:
        raise Skipped("neither actionlint nor zizmor is installed")
    return f"{', '.join(done)}{''.join(f'; skipped: {name} is not installed' for name in missing)}"


def hub() -> str:
    """Check that the package is written in the kernels hub's layout, and that its build loads."""
    return run_tests("tests/project/test_hub.py")


def matrix() -> str:
    """Check that the wheel works with every supported version."""
    text = command(sys.executable, "-m", "tools.versions")
    return "; ".join(line for line in text.splitlines() if re.match(r"3\.\d+-", line))


def main(arguments: list[str]) -> int:
    """Run all checks; return the exit code."""
    failed = False

    def check(name: str, run: Callable[[], str]) -> None:
        nonlocal failed
        try:
            print(f"{name}: passed: {run()}", flush=True)
        except Skipped as reason:
            print(f"{name}: skipped: {reason}", flush=True)
        except (RuntimeError, AssertionError) as error:
            failed = True
            print(f"{name}: FAILED: {error}", flush=True)

    with tempfile.TemporaryDirectory(prefix="gac-release-") as folder:
        wheel = versions.build_wheel(Path(folder))
        check("metadata", lambda: metadata(wheel))
        check("platform", lambda: platform_tag(wheel))
    check("packages", packages)
    check("imports", imports)
    check("workflows", workflows)
    check("kernels hub", hub)
    if "--quick" in arguments:
        print("versions: skipped: --quick")
    else:
        check("versions", matrix)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
