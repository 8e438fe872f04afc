"""No report is wider than the screen, or logs an error in a browser."""

from pathlib import Path

from gac.report import write_report
from tests.browser import WIDTHS, needs_browser, problems

from .test_report import write_run


@needs_browser
def test_reports_fit_the_screen_and_log_no_error(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"a-run-with-a-long-name-{method}-{seed}", method, seed)
        for method, seed in (("gac", 0), ("gac", 1), ("constant-alarm", 0))
    ]
    write_report(runs[:1], tmp_path / "one")
    write_report(runs, tmp_path / "all")
    wide = tmp_path / "wide.html"
    wide.write_text("<div style='width: 2000px'>wide</div><script>throw Error('no')</script>")
    reports = [tmp_path / name / "report.html" for name in ("one", "all")]
    found, logged = problems([*reports, wide], tmp_path)
    assert found == [f"wide.html at {width}" for width in WIDTHS]
    assert all("Error: no" in text for text in logged)
    assert len(logged) == len(WIDTHS)
