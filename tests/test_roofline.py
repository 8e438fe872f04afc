"""docs/roofline.md is up to date, and its tables show the measured values."""

from __future__ import annotations

import json

from bench import roofline, table


def counts() -> dict:
    return json.loads(roofline.COUNTS.read_text())


def test_the_page_is_the_programs() -> None:
    """After changing counts or results, run `python -m bench.roofline`."""
    assert roofline.PAGE.read_text() == roofline.page(counts(), table.newest("cuda"))


def test_every_cell_without_a_run_says_so() -> None:
    text = roofline.page(counts(), None)
    tables = [line for line in text.splitlines() if line.startswith("| Qwen")]
    assert len(tables) == len(roofline.SHAPES) * (len(roofline.GIVEN) + len(roofline.LINEAR))
    assert all(line.endswith("| not measured |") for line in tables)


def test_a_share_is_the_bound_over_the_time() -> None:
    place = {"shape": "Qwen2.5-7B", "tokens": roofline.TOKENS}
    csrc = next(k for k in roofline.GIVEN if (k.name, k.task) == ("csrc", "loss"))
    head = roofline.HEADS["Qwen2.5-7B"]
    least = roofline.bound(csrc, head, counts(), roofline.H200)
    # 8192 rows of 152064 words, two bytes read and two written, at 4.8 TB/s
    assert abs(least.memory - 1e3 * 8192 * 152064 * 4 / 4.8e12) < 1e-9
    assert least.ms == max(least.memory, least.issue)
    rows = [
        {**place, "work": "logits", "provider": "ours, csrc", "ms": 2 * least.ms},
        {**place, "work": "linear", "provider": "ours", "ms": 40.0},
    ]
    text = roofline.page(counts(), {"device": "Some GPU", "date": "2026-01-02", "rows": rows})
    lines = {tuple(line.split("|")[1:3]): line for line in text.splitlines() if "| Qwen" in line}
    assert (
        lines[" Qwen2.5-7B ", " csrc loss "].count("not measured") == 1
    )  # the linear form has no measurement
    assert "| 50% |" in text
    products = 1e3 * 6 * 8192 * 3584 * 152064 / 989e12
    share = (products + 1e3 * 8192 * 152064 * 10 / 4.8e12) / 40
    assert f"| {share:.0%} |" in text
