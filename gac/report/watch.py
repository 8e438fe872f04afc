"""`gac report --watch`: a local web page with the report of runs that go on."""

from __future__ import annotations

import contextlib
import http.server
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import write_report

RELOAD = 10  # seconds between reloads of the page in the browser


def serve(folders: Sequence[Path], port: int = 0) -> int:
    """Serve the report on the loopback address until Ctrl-C; returns the exit code 0.

    port: 0 for any free port. Whenever the page is loaded after a run has written to its logs, the
    report is written again, to a temporary folder.
    """
    with tempfile.TemporaryDirectory() as out, make_server(folders, Path(out), port) as server:
        print(f"http://127.0.0.1:{server.server_port} (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def make_server(folders: Sequence[Path], out: Path, port: int) -> http.server.HTTPServer:
    """The server that `serve` runs; the report is written to `out`."""
    written: list[float] = []  # when the newest log was written, at the time of the last report

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            logs = [max(f.stat().st_mtime for f in folder.glob("*.json*")) for folder in folders]
            if written != logs:
                write_report(folders, out)
                written[:] = logs
            page = (out / "report.html").read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Refresh", str(RELOAD))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Keep the terminal quiet."""

    return http.server.HTTPServer(("127.0.0.1", port), Handler)
