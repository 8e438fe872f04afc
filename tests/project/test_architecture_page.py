"""docs/architecture.md names files and functions that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def names(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            members = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{m.name}" for m in members if isinstance(m, ast.FunctionDef)}
    return found


def test_the_named_functions_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    pairs = re.findall(r"`(gac\w*/[\w/]+\.py)` `([\w.]+)`", text)
    assert len(pairs) >= 20
    assert not [f"{file} {name}" for file, name in pairs if name not in names(ROOT / file)]
    assert all((ROOT / file).exists() for file in re.findall(r"`([\w/]+/[\w/.]+)`", text))
