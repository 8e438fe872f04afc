"""bench/roofline.md is up to date, and its tables show the measured values."""

from __future__ import annotations

import json

from bench import roofline, table


def counts() -> dict:
    return json.loads(roofline.COUNTS.read_text())


def test_page_is_up_to_date() -> None:
    """After changing counts or results, run `python -m bench.roofline`."""
    assert roofline.PAGE.read_text() == roofline.page(counts(), table.newest("cuda"))


def test_unmeasured_cells_say_not_measured() -> None:
    text = roofline.page(counts(), None)
    tables = [line for line in text.splitlines() if line.startswith("| Qwen")]
    kernels = len(roofline.GIVEN_LOGITS) + len(roofline.LINEAR_FORM)
    assert len(tables) == len(roofline.SHAPES) * kernels
    assert all(line.endswith("| not measured |") for line in tables)


def test_share_is_bound_divided_by_time() -> None:
    common = {"shape": "Qwen2.5-7B", "tokens": roofline.TOKENS}
    csrc = next(k for k in roofline.GIVEN_LOGITS if (k.name, k.task) == ("csrc", "loss"))
    head = roofline.HEADS["Qwen2.5-7B"]
    bound = roofline.bound(csrc, head, counts(), roofline.H200)
    # 8192 rows of 152064 logits, two bytes read and two written, at 4.8 TB/s
    assert abs(bound.memory - 1e3 * 8192 * 152064 * 4 / 4.8e12) < 1e-9
    assert bound.ms == max(bound.memory, bound.issue)
    rows = [
        {**common, "work": "logits", "provider": "ours, csrc", "ms": 2 * bound.ms},
        {**common, "work": "linear", "provider": "ours", "ms": 40.0},
    ]
    text = roofline.page(counts(), {"device": "Some GPU", "date": "2026-01-02", "rows": rows})
    lines = {tuple(line.split("|")[1:3]): line for line in text.splitlines() if "| Qwen" in line}
    # `lines` has the line of the linear form, which has no measurement
    assert lines[" Qwen2.5-7B ", " csrc loss "].count("not measured") == 1
    assert "| 50% |" in text
    gemm_ms = 1e3 * 6 * 8192 * 3584 * 152064 / 989e12
    share = (gemm_ms + 1e3 * 8192 * 152064 * 10 / 4.8e12) / 40
    assert f"| {share:.0%} |" in text
