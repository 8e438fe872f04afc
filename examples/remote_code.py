"""A code reward that runs programs on a remote service instead of in our own sandbox.

    reward: {name: "remote_code:remote_code", url: "http://sandbox.internal:8080", batch: true}

(with `examples` on PYTHONPATH). It speaks the HTTP interface of SandboxFusion: POST /run_code.
Rows hold `cases`, pairs of standard input and expected output. The service only runs programs; the
outputs are compared here, so a program cannot fake a pass by exiting or by changing the tests.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gac.data import Example
from gac.rewards.code import program_of

QUEUE_SECONDS = 60.0  # how long a program may wait at a busy service before it runs


def remote_code(
    completions: Sequence[str],
    examples: Sequence[Example],
    *,
    url: str,
    timeout: float = 10.0,
    workers: int = 16,
) -> list[float]:
    """Return 1 for each completion whose program passes all cases of its row, else 0.

    Args:
        completions: the model's responses.
        examples: their rows, each with the field `cases`.
        url: address of the service.
        timeout: seconds per case.
        workers: concurrent requests.

    Raises:
        OSError: the service cannot be reached; this stops training instead of scoring 0.
    """

    def grade(completion: str, example: Example) -> float:
        program = program_of(completion)
        return float(
            all(
                run(url, program, stdin, timeout) == expected.split()
                for stdin, expected in example.extra["cases"]
            )
        )

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(grade, completions, examples))


def run(url: str, program: str, stdin: str, timeout: float) -> list[str] | None:
    """The words that the program writes, or None if it did not finish or failed."""
    body: dict[str, Any] = {"code": program, "language": "python", "stdin": stdin}
    body["run_timeout"] = timeout
    request = urllib.request.Request(
        f"{url}/run_code", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout + QUEUE_SECONDS) as response:
        result = json.load(response).get("run_result") or {}
    finished = result.get("status") == "Finished" and result.get("return_code") == 0
    return str(result.get("stdout", "")).split() if finished else None
