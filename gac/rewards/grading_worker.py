"""Worker process that grades math answers.

Reads one JSON pair [reference, answer] per line and writes one verdict per line.

Run as a script by `grading_pool`. Imports nothing from this package, to avoid loading torch.
Hanging checks are stopped by a kernel timer whose default action kills this process, because Python
code cannot interrupt a long integer power that holds the GIL.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
from functools import lru_cache
from typing import Any

STARTUP_SECONDS = 120.0  # importing sympy takes half a second on an idle machine
MEMORY_BYTES = 4 << 30  # keeps 9**9**9 from exhausting the machine's memory before it times out
PARENT_POLL_SECONDS = 5.0
# backstop only: CPU time is the main limit, so that load does not change scores
WALL_PER_CPU_SECOND = 20.0


def main(timeout: float, parent: int) -> None:
    """Serve until an empty line, the end of stdin or the death of process `parent`.

    Args:
        timeout: CPU seconds per check.
        parent: pid of the process that started this one.
    """
    sys.stdout = sys.stderr  # third-party code must not print among the replies
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, STARTUP_SECONDS)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # not supported on macOS
        resource.setrlimit(
            resource.RLIMIT_AS,
            (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard), hard),
        )
    try:
        grade = make_grader()
    except ImportError as error:
        _reply(f"cannot start: {error}")
        return
    _reply("ready")  # the first request, which sets the timer anew, follows at once
    while _wait_for_request(parent):
        line = sys.stdin.buffer.readline()
        if not line.strip():
            return
        signal.setitimer(signal.ITIMER_PROF, timeout)
        signal.setitimer(signal.ITIMER_REAL, timeout * WALL_PER_CPU_SECOND)
        verdict = grade(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(verdict)


def _wait_for_request(parent: int) -> bool:
    """Wait until stdin is readable.

    Returns False if the parent died while one of its forks keeps stdin open.
    """
    while not select.select([sys.stdin], [], [], PARENT_POLL_SECONDS)[0]:
        if os.getppid() != parent:
            return False
    return True


def _reply(text: str) -> None:
    print(text, file=sys.__stdout__, flush=True)


def make_grader() -> Any:
    """Return a function (reference, answer) -> "right", "wrong" or "bad reference"."""
    from math_verify import parse, verify

    @lru_cache(maxsize=4096)  # all rollouts of a prompt share their reference answer
    def parse_reference(text: str) -> Any:
        return parse(text, parsing_timeout=None)

    def grade(reference_answer: str, answer: str) -> str:
        try:
            parsed_reference = parse_reference(reference_answer)
        except Exception:  # math-verify does not catch all sympy errors
            parsed_reference = []
        if not parsed_reference:
            return "bad reference"
        try:
            parsed_answer = parse(answer, parsing_timeout=None)
            is_right = verify(parsed_reference, parsed_answer, timeout_seconds=None)
            return (
                "right"
                if is_right and _is_close(parsed_reference[0], parsed_answer[0])
                else "wrong"
            )
        except Exception:  # including MemoryError and RecursionError: the answer scores 0
            return "wrong"

    return grade


def _is_close(gold: Any, answer: Any) -> bool:
    """False for different numbers near 0, which math-verify rounds to the same 6 decimals."""
    a, b = (
        complex(x) if getattr(x, "is_number", False) and x.is_finite else math.nan
        for x in (gold, answer)
    )
    return not 0 < abs(a) < 1e-3 or not abs(a - b) > 1e-3 * abs(a)


if __name__ == "__main__":
    main(timeout=float(sys.argv[1]), parent=int(sys.argv[2]))
