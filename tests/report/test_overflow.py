"""Nothing is wider than the screen: reports and the built site in headless Chromium."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from gac.report import write_report

from .test_report import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SITE = Path(__file__).parents[2] / "docs" / "_build" / "html"
WIDTHS = (390, 1280)  # pixels: a telephone and a laptop
# in each frame: how far the page reaches beyond its right edge, and the elements that do
MEASURE = """<body><pre id="found"></pre><script>
const found = {}, cases = %s;
for (const [page, width] of cases) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 800px; border: 0`;
  frame.src = page;
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    const beyond = root.scrollWidth - root.clientWidth, wide = [];
    if (beyond > 0)
      for (const element of root.querySelectorAll("*"))
        if (element.getBoundingClientRect().right > root.clientWidth + 1)
          wide.push(element.outerHTML.slice(0, 80));
    found[`${page} at ${width}`] = [beyond, wide.slice(0, 3)];
    document.getElementById("found").textContent = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def overflows(root: Path, pages: list[str]) -> dict[str, list]:
    """The pages under `root` that are wider than a screen, with what reaches beyond it."""
    cases = [(page, width) for page in pages for width in WIDTHS]
    measure = root / "measure.html"
    measure.write_text(MEASURE % json.dumps(cases))
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=root)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ]
    try:
        with tempfile.TemporaryDirectory() as profile:
            text = subprocess.run(
                [
                    CHROMIUM,
                    *options,
                    f"--user-data-dir={profile}",
                    f"http://127.0.0.1:{server.server_port}/{measure.name}",
                ],
                capture_output=True,
                check=True,
                text=True,
                timeout=25,
            ).stdout
    finally:
        server.shutdown()
        server.server_close()
        measure.unlink()
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', text, re.S)[1]))
    assert len(found) == len(cases), "a page did not load"
    return {case: wide for case, (beyond, wide) in found.items() if beyond > 0}


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium in the PATH")


@needs_chromium
def test_reports_are_not_wider_than_the_screen(tmp_path):
    runs = [
        write_run(tmp_path / f"a-run-with-a-long-name-{method}-{seed}", method, seed)
        for method, seed in (("gac", 0), ("gac", 1), ("constant-alarm", 0))
    ]
    write_report(runs[:1], tmp_path / "one")
    write_report(runs, tmp_path / "all")
    (tmp_path / "wide.html").write_text("<div style='width: 2000px'>wide</div>")
    found = overflows(tmp_path, ["one/report.html", "all/report.html", "wide.html"])
    assert list(found) == [f"wide.html at {width}" for width in WIDTHS], found


@needs_chromium
@pytest.mark.skipif(not SITE.exists(), reason="needs the site: make docs")
def test_the_site_is_not_wider_than_the_screen():
    pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    assert overflows(SITE, pages) == {}
