"""`gac report --watch`: a local web page with the report of runs that go on."""

from __future__ import annotations

import contextlib
import html
import http.server
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from gac.errors import ConfigError

from . import find_folders, write_report

RELOAD = 10  # seconds between reloads of the page in the browser


def serve(paths: Sequence[Path], port: int = 0) -> int:
    """Serve the report on the loopback address until Ctrl-C; returns the exit code 0.

    Whenever the page is loaded after a run has written to its logs, the report is written again, to
    a temporary folder. Runs that begin later are found too.

    Args:
        paths: run directories, or folders that contain runs, now or later.
        port: 0 for any free port.

    Raises:
        ConfigError: a path does not exist, or the port is taken.
    """
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: no such folder: give a run, or the folder of its runs")
    with tempfile.TemporaryDirectory() as out, make_server(paths, Path(out), port) as server:
        print(f"http://127.0.0.1:{server.server_port} (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def make_server(paths: Sequence[Path], out: Path, port: int) -> http.server.HTTPServer:
    """The server that `serve` runs; the report is written to `out`."""
    written: list[tuple[Path, float]] = []  # the logs and their times at the last report
    drawing = threading.Lock()

    def page() -> bytes:
        folders = find_folders(paths)
        logs = [(log, log.stat().st_mtime) for path in folders for log in path.glob("*.json*")]
        if written != logs:
            write_report(folders, out)
            written[:] = logs
        return (out / "report.html").read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            try:
                with drawing:
                    body = page()
            except (FileNotFoundError, ConfigError) as error:  # nothing to show yet
                body = f"<p>Waiting: {html.escape(str(error))}</p>".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Refresh", str(RELOAD))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the terminal quiet."""

    try:  # a thread for each connection, because browsers open some that they do not use
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port={port}: {error}: choose another port"
            if isinstance(error, OSError)
            else f"--port={port}: use a number from 0 to 65535"
        ) from error
