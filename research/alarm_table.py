"""Tests the alarm on artificial loss streams: `python -m research.alarm_table [--seeds N]`.

Writes the table in research/alarm_streams.md. The streams are those of the alarm's tests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gac.evaluation.table import markdown_table
from tests.control.streams import STEPS, STREAMS, run

PAGE = Path(__file__).with_name("alarm_streams.md")
MARK = "<!-- below: python -m research.alarm_table -->\n"
ISSUED = 12  # number of streams that were known when the alarm was designed


def table(seeds: int) -> str:
    """The Markdown table of all streams."""
    head = "stream | wrong decisions | worst run | false alarms per 1,000 steps | longest delay"
    rows = []
    for number, (name, stream) in enumerate(STREAMS.items()):
        results = [run(stream, seed) for seed in range(seeds)]
        wrong = [100 * r.wrong for r in results]
        alarms = sum(r.false_alarms for r in results) * 1000 / STEPS / seeds
        delays = [r.delay for r in results if r.delay is not None]
        delay = f"{max(delays)} step{'s' * (max(delays) != 1)}" if delays else ""
        label = name if number < ISSUED else f"*{name}*"
        rows.append((label, f"{np.mean(wrong):.2f}%", f"{max(wrong):.1f}%", f"{alarms:.2f}", delay))
    return markdown_table(head.split(" | "), rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.alarm_table", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="draws of each stream")
    seeds = parser.parse_args(argv).seeds
    before, _, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{before}{MARK}\nRuns per stream: {seeds}.\n\n{table(seeds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
