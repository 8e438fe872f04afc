"""The documentation site: no warnings, no broken links, and no errors in a browser."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import needs_browser, problems

ROOT = Path(__file__).resolve().parents[2]
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


@needs_browser
def test_every_page_fits_the_screen_and_logs_no_error(tmp_path):
    assert problems(sorted(SITE.rglob("*.html")), tmp_path) == ([], [])
