"""Pages in headless Chromium."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
WIDTHS = (390, 1280)  # pixels: a telephone and a laptop; wider content must scroll in its own box
MEASURE = """onload = () => document.querySelectorAll("iframe").forEach(frame => {
    const root = frame.contentDocument.documentElement;
    frame.title = root.scrollWidth - root.clientWidth })"""
FLAGS = """
--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
--disable-component-update --disable-sync --allow-file-access-from-files --enable-logging=stderr
--dump-dom --virtual-time-budget=20000
"""


def problems(pages: list[Path], folder: Path) -> tuple[list[str], list[str]]:
    """The pages that are wider than a screen, and the errors that pages log.

    Starts the browser once, with all pages as iframes of a page that is written into `folder`.
    """
    cases = [(page, width) for page in pages for width in WIDTHS]
    frames = "".join(f'<iframe width="{w}" src="{page.as_uri()}"></iframe>' for page, w in cases)
    index = folder / "all.html"
    index.write_text(f"<!doctype html><title>all</title>{frames}<script>{MEASURE}</script>")
    result = subprocess.run(
        [str(BROWSER), *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", index.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0
    assert result.stdout.count("<iframe") == len(cases)
    found = zip(cases, map(int, re.findall(r'title="(\d+)"', result.stdout)), strict=True)
    return [f"{page.name} at {w}" for (page, w), x in found if x > 0], re.findall(
        r'CONSOLE[^\n]*"(?:Uncaught|Failed|Error)[^\n]*', result.stderr
    )
