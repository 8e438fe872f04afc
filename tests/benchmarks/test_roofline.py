"""bench/roofline.md is up to date, and its tables show the measured values."""

import json

import pytest

from bench import roofline, table


def counts() -> dict:
    return json.loads(roofline.COUNTS.read_text())


def test_page_is_up_to_date() -> None:
    """After changing counts or results, run `python -m bench.roofline`."""
    assert roofline.PAGE.read_text() == roofline.page(
        counts(), {name: table.newest("cuda", name) for name in table.GPUS}
    )


def test_unmeasured_cells_say_not_measured() -> None:
    text = roofline.page(counts(), dict.fromkeys(table.GPUS))
    tables = [line for line in text.splitlines() if line.startswith("| Qwen")]
    kernels = len(roofline.GIVEN_LOGITS) + len(roofline.LINEAR_FORM)
    assert len(tables) == len(roofline.DEVICES) * len(roofline.SHAPES) * kernels
    assert all(line.endswith("| not measured |") for line in tables)


@pytest.mark.parametrize(("device", "rate"), [("H100", 3.35e12), ("H200", 4.8e12)])
def test_share_is_bound_divided_by_time(device: str, rate: float) -> None:
    """A measurement is compared with the limits of its own device."""
    common = {"shape": "Qwen2.5-7B", "tokens": roofline.TOKENS}
    csrc = next(k for k in roofline.GIVEN_LOGITS if (k.name, k.task) == ("csrc", "loss"))
    bound = roofline.bound(csrc, roofline.HEADS["Qwen2.5-7B"], counts(), roofline.DEVICES[device])
    # 8192 rows of 152064 logits, two bytes read and two written
    assert abs(bound.memory - 1e3 * 8192 * 152064 * 4 / rate) < 1e-9
    assert bound.ms == max(bound.memory, bound.issue)
    rows = [
        {**common, "work": "logits", "provider": "ours, csrc", "ms": 2 * bound.ms},
        {**common, "work": "linear", "provider": "ours", "ms": 60.0},
    ]
    document = {"device": f"NVIDIA {device} 80GB HBM3", "date": "2026-01-02", "rows": rows}
    text = roofline.section(device, counts(), document)
    lines = {tuple(line.split("|")[1:3]): line for line in text.splitlines() if "| Qwen" in line}
    # `lines` has the line of the linear form, which has no measurement
    assert lines[" Qwen2.5-7B ", " csrc loss "].count("not measured") == 1
    assert "| 50% |" in text
    gemm_ms = 1e3 * 6 * 8192 * 3584 * 152064 / 989e12
    share = (gemm_ms + 1e3 * 8192 * 152064 * 10 / rate) / 60
    assert f"| {share:.0%} |" in text


def test_traffic_of_the_weight_gradient_follows_from_the_chunks() -> None:
    """The library's own chunk sizes; one chunk writes bfloat16 once."""
    small, large = (roofline.HEADS[name] for name in ("Qwen2.5-1.5B", "Qwen2.5-7B"))
    assert roofline.chunks(large) == 1
    count = roofline.chunks(small)
    assert count == 4
    lines = roofline.section("H100", counts(), None).splitlines()
    (row,) = (line for line in lines if "1.5B | Triton loss | 11.5 |" in line)
    traffic = 8 * count * 1536 * 151936
    assert f" {count} | {1e3 * traffic / 3.35e12:.2f} |" in row
