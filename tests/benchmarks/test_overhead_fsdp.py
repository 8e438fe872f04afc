"""The program of the paper's table 14: its arithmetic, its table, and a dry run on two ranks."""

import json

import pytest

import bench.overhead_fsdp as overhead
from tests import ranks


def measured(**changes):
    seconds = {
        ("gac", True): [1.3, 1.4],
        ("gac", False): [1.0, 1.0],
        ("bare", True): [1.0, 1.0],
        ("bare", False): [1.0, 1.0],
    }
    return overhead.summary(seconds, {"gac": 20.0, "bare": 19.0}) | changes


def test_a_refresh_counts_for_one_step_in_ten():
    row = measured()
    assert row["step_seconds"] == pytest.approx(1.035)
    assert row["overhead_percent"] == pytest.approx(3.5)
    # a t interval of 3 and 4 percent
    assert row["ci95"] == pytest.approx([3.5 - 12.706 * 0.5, 3.5 + 12.706 * 0.5], rel=1e-3)


def test_lengths_that_were_not_run_say_so_and_the_papers_numbers_are_the_papers(
    monkeypatch, tmp_path
):
    pages = []
    monkeypatch.setattr(overhead, "RESULTS", tmp_path)
    monkeypatch.setattr(overhead, "copy_out", lambda path: None)
    monkeypatch.setattr(overhead, "fill", lambda page, block, text: pages.append(text))
    keys = {"model": overhead.SHAPE, "train": "full", "ranks": 8, "device": "X", "length": 4096}
    for commit in ("a", "b"):  # the second replaces the first
        overhead.save([measured(**keys, date="2026-01-01", commit=commit)])
    assert [
        row["commit"] for row in json.loads((tmp_path / overhead.FILE).read_text())["cases"]
    ] == ["b"]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in pages[-1].splitlines()]
    seconds = f"{measured()['step_seconds']:.2f}"  # 1.035 lies between two roundings
    assert lines[2][:4] == [f"{overhead.SHAPE}, full", "8 x X", "4096", seconds]
    assert [(line[2], line[3]) for line in lines[3:5]] == [
        ("2048", "not measured"),
        ("8192", "not measured"),
    ]
    assert lines[5] == [
        *("the paper, Qwen2.5-7B", "8 GPUs", "2048", "1.00", "+0.6%", "22.4", "arXiv 2605.26184")
    ]


def dry_run(arguments):
    """What rank 0 would save; the rows of both ranks have the given length."""
    return overhead.main(arguments)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_two_processes_run_dry_with_a_tiny_model(train):
    if train == "lora":
        pytest.importorskip("peft", reason="the extra `lora` is not installed")
    arguments = ["--tiny", "--lengths", "16", "--rounds", "2", "--train", train]
    for ((row,),) in zip(ranks.run(dry_run, arguments, ranks=2), strict=True):
        assert (row["ranks"], row["length"], row["model"]) == (2, 16, "tiny")
        assert (row["kl_rollouts"], row["rollouts"]) == (2, 16)
        assert row["step_seconds"] > 0
        assert row["peak_gib"] > 0
