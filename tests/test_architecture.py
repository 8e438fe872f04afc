"""The floor plan: imports flow one way, files stay small, no path of a machine is in."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("gac_kernels", "gac", "tools", "bench", "tests")  # each may import those before it
EXTERNAL = {  # what the kernels may import: they must run beside any trainer
    "gac_kernels": {"torch", "triton"},
}
LIMIT = 400


def tracked(*suffixes: str) -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if found.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in found.stdout.splitlines()]
    return [p for p in paths if p.suffix in suffixes and p.exists()]


def imported(path: Path) -> set[str]:
    """Top-level names of absolute imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_imports_flow_one_way():
    wrong = []
    for path in tracked(".py"):
        layer = path.relative_to(ROOT).parts[0]
        if layer not in LAYERS:
            continue
        later = set(LAYERS[LAYERS.index(layer) + 1 :])
        wrong += [f"{path.relative_to(ROOT)} imports {n}" for n in imported(path) & later]
    assert not wrong


def test_kernels_need_only_torch_and_triton():
    import sys

    wrong = []
    for path in (ROOT / "gac_kernels").rglob("*.py"):
        foreign = imported(path) - set(sys.stdlib_module_names) - {"gac_kernels"}
        wrong += [f"{path.name} imports {n}" for n in foreign - EXTERNAL["gac_kernels"]]
    assert not wrong


def test_the_trainer_never_names_a_method():
    from gac.methods import METHODS
    from gac_kernels.contract import REDUCTIONS

    rooms = [ROOT / "gac" / room for room in ("data", "rollouts", "training")]
    for path in [p for room in rooms for p in room.glob("*.py")]:
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & set(METHODS) - set(REDUCTIONS), path  # "constant" is both


def test_files_stay_small():
    long = {
        str(p.relative_to(ROOT)): n
        for p in tracked(".py", ".cpp", ".cu", ".h", ".cuh")
        if (n := len(p.read_text().splitlines())) > LIMIT
    }
    assert not long


def test_exceptions_to_lint_and_types_have_a_reason():
    """Beside the mark or, as a comment, in the line above; unused ones are errors of the tools."""
    mark = re.compile(r"# (?:noqa|type: ignore)\b(?:: ?[A-Z0-9, ]+|\[[a-z, -]+\])(.*)")
    bare = []
    for path in tracked(".py"):
        if path.relative_to(ROOT).parts[0] not in LAYERS or path == Path(__file__):
            continue
        above = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = mark.search(line)
            if found and not found[1].strip() and not above.lstrip().startswith("#"):
                bare.append(f"{path.relative_to(ROOT)}:{number}")
            above = line
    assert not bare


def test_no_machine_paths():
    places = ["/" + name + "/" for name in ("work", "farm", "root")]
    wrong = [
        f"{p.relative_to(ROOT)}: {place}"
        for p in tracked(".py", ".md", ".toml", ".yaml", ".yml", ".cpp", ".h", ".cu", ".html", "")
        for place in places
        if place in p.read_text(errors="replace")
    ]
    assert not wrong
