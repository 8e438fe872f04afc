"""research/ stands apart: nothing imports it, and each of its commands starts."""

import re
import subprocess
import sys

from tests.project.test_architecture import ROOT, imports, tracked

README = ROOT / "research" / "README.md"
START = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name).main(["--help"])
    except SystemExit as stop:
        assert stop.code == 0, name
from research import study_results
sys.exit(study_results.main(["--check"]))
"""


def test_nothing_outside_imports_it():
    importers = [
        path.relative_to(ROOT)
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] != "research"
        and any(name.split(".")[0] == "research" for name in imports(path))
    ]
    assert not importers


def test_its_page_lists_every_file():
    text = README.read_text()
    files = [path for path in (ROOT / "research").iterdir() if path.suffix in (".py", ".md")]
    missing = [
        path.name
        for path in files
        if path.name not in ("README.md", "__init__.py")
        and path.name not in text
        and f"research.{path.stem}" not in text
    ]
    assert not missing


def test_smoke():
    """Every command of the page prints its help; the study's tables follow from its results."""
    commands = sorted(set(re.findall(r"`python -m (research\.\w+)", README.read_text())))
    assert len(commands) >= 5
    started = subprocess.run(
        [sys.executable, "-c", START, *commands],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert started.returncode == 0, started.stdout[-2000:] + started.stderr[-2000:]
    assert all(f"usage: python -m {command}" in started.stdout for command in commands)
