"""The documentation site: no warnings, no broken links, and no errors in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHONE = 390  # width in pixels; wider content must scroll inside its own box
MEASURE = """onload = () => document.querySelectorAll("iframe").forEach(frame => {
    frame.title = frame.contentDocument.documentElement.scrollWidth })"""
FLAGS = """
--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
--disable-component-update --disable-sync --allow-file-access-from-files --enable-logging=stderr
--dump-dom --virtual-time-budget=20000
"""
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


SITE = ROOT / "docs" / "_build" / "html"
pytestmark = pytest.mark.skipif(not SITE.exists(), reason="no site: run make docs first")


class Page(HTMLParser):
    """The targets of a page's links and images, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        self.targets |= {values[k] for k in ("href", "src") if values.get(k)}


def test_link_targets_and_anchors_exist():
    pages = {path: Page(path) for path in SITE.rglob("*.html")}
    assert len(pages) > 20
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or (target.startswith("#") and path.name == "search.html"):
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            exists = file.exists() and (
                file not in pages or unquote(parts.fragment) in pages[file].anchors
            )
            if not exists:
                broken.append(f"{path.relative_to(SITE)}: {target}")
    assert not broken


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_every_page_fits_a_phone_and_logs_no_error(tmp_path):
    """Starts the browser once, with all pages as iframes of a single page."""
    pages = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
    frames = "".join(
        f'<iframe width="{PHONE}" src="{SITE.as_uri()}/{page}"></iframe>' for page in pages
    )
    index = tmp_path / "all.html"
    index.write_text(f"<!doctype html><title>all</title>{frames}<script>{MEASURE}</script>")
    result = subprocess.run(
        [BROWSER, *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", index.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and result.stdout.count("<iframe") == len(pages)
    logged = re.findall(r'CONSOLE[^\n]*"(?:Uncaught|Failed|Error)[^\n]*', result.stderr)
    assert not logged
    widths = map(int, re.findall(r'title="(\d+)"', result.stdout))
    assert {p: w for p, w in zip(pages, widths, strict=True) if w > PHONE} == {}
