"""The example of a remote sandbox, with a small service in place of a real one."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gac.data import Example
from gac.rewards import build_reward
from gac.sandbox.pool import Pool, Program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
CASES = [["3\n", "6\n"], ["5\n", "10\n"]]


@pytest.fixture(scope="module")
def url():
    """Address of a service with the interface of SandboxFusion."""
    pool = Pool(workers=2)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            program, stdin = Program(body["code"]), body["stdin"].encode()
            outcome = pool.run(program, stdin, int(body["run_timeout"]), 256, 1 << 16)
            result = {"status": "Finished" if outcome.ending == "ended" else "TimeLimitExceeded"}
            result |= {"return_code": outcome.status, "stdout": outcome.stdout.decode()}
            answer = json.dumps({"status": "Success", "run_result": result}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    pool.close()


def test_programs_are_graded_by_a_remote_service(url, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    reward = build_reward(
        {"name": "remote_code:remote_code", "url": url, "timeout": 1, "batch": True}
    )
    programs = [
        "```python\nprint(2 * int(input()))\n```",
        "print(6)",
        "import os\nos._exit(0)",
        "while True: pass",
        "1 / 0",
    ]
    assert reward(
        programs, [Example("row", (), "", None, None, {"cases": CASES})] * len(programs)
    ) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_service_that_is_down_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    spec = {"name": "remote_code:remote_code", "url": "http://127.0.0.1:1", "batch": True}
    row = Example("row", (), "", None, None, {"cases": CASES})
    with pytest.raises(ValueError, match="Connection refused"):
        build_reward(spec)(["print(1)"], [row])
