"""The page that maps the paper to this repository."""

import importlib
import re
from pathlib import Path

from gac.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]


def test_paper_map_references_exist():
    text = (ROOT / "research" / "paper_map.md").read_text()
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    code = re.findall(r"`((?:gac|gac_kernels)[\w.]*):(\w+)`", text)
    assert len(tests) > 10
    assert len(code) > 10
    for path, name in tests:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)
    for module, name in code:
        assert hasattr(importlib.import_module(module), name), (module, name)
    for name in METHODS:
        assert f"`{name}`" in text, name
