"""The benchmarks' own code, at sizes that take no time: checks, rows, tables."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from bench import bench_gpu_logits, smoke, table
from bench import record as record_module
from bench.batches import Head, linear_batch
from bench.bench_gpu_linear import FORWARD, GEMMS, HALF, runnable
from bench.bench_gpu_linear import compare as compare_linear
from bench.linear_losses import errors, ours, truth
from bench.record import Record

CPU = torch.device("cpu")


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    return tmp_path


def test_gpu_linear_bench_runs_on_a_cpu() -> None:
    """Every provider that a CPU has agrees with float64, and each leaves a row."""
    record = Record()
    best = compare_linear(record, CPU, "tiny", Head(64, 500), 512, seconds=0)
    assert {GEMMS, HALF, FORWARD, "ours", "eager"} <= best.keys()
    assert all(ms > 0 for ms in best.values())
    rows = {row["provider"]: row for row in record.rows}
    assert rows["ours"]["logp_error"] < 2e-4 and len(rows["ours"]["errors"]) == 3
    for name in rows.keys() - best.keys():
        assert rows[name]["not_run"], f"{name} was not run and nobody says why"


def test_gpu_logits_bench_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton and TRL's Triton, whose interpreter would take minutes."""
    monkeypatch.setattr(bench_gpu_logits, "BACKENDS", {"ours, csrc": "native"})
    monkeypatch.setitem(sys.modules, "trl.kernels.logprob_entropy", None)
    record = Record()
    best = bench_gpu_logits.compare(record, CPU, "tiny", 512, 300, bandwidth=10.0, seconds=0)
    assert {"copy", "eager"} <= best.keys()
    assert all("ms" in row or row["not_run"] for row in record.rows)


def test_a_step_that_fails_is_left_out_and_explained() -> None:
    def fails() -> None:
        raise RuntimeError("out of memory\nand more")

    failed: dict[str, str] = {}
    steps = {"peer": fails, "other": lambda: None}
    assert runnable(steps, failed).keys() == {"other"}
    assert failed == {"peer": "RuntimeError: out of memory"}
    with pytest.raises(RuntimeError, match="out of memory"):
        runnable({"ours": fails}, failed)


def test_a_backend_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the child's: it has no GPU then
    assert smoke.problem("reference", "cpu") is None
    assert "after 0.1 s" in smoke.problem("reference", "cpu", seconds=0.1)
    loaded = smoke.backends.load("triton", torch.device("cpu"))
    monkeypatch.setattr(loaded, "unavailable", lambda *_: None)
    assert "no device 'cpu'" in smoke.problem("triton", "cpu")


def test_a_wrong_loss_is_noticed() -> None:
    batch = linear_batch(512, Head(32, 100), torch.float32, CPU)
    assert max(errors(ours, truth, batch)) < 1e-5
    assert min(errors(lambda b: 1.01 * ours(b), truth, batch)) > 0.009


def test_rows_replace_only_their_own(results) -> None:
    for ms in (3.0, 2.0):
        record = Record()
        record.add(device="cpu", work="w", shape="s", tokens=1, case="c", provider="a", ms=ms)
        record.save()
    other = Record()
    other.add(device="cpu", work="w", shape="s", tokens=1, case="c", provider="b", ms=5.0)
    (path,) = other.save()
    document = json.loads(path.read_text())
    assert [(r["provider"], r["ms"]) for r in document["rows"]] == [("a", 2.0), ("b", 5.0)]
    assert document["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_cells_without_a_result_say_so(results) -> None:
    assert table.cpu_table(table.newest("cpu")).startswith("CPU: not measured")
    text = table.gpu_table(table.newest("cuda"))
    assert text.count("not measured") == 1 + 9 * 7 + 8 * 3


def test_table_holds_what_was_measured(results) -> None:
    place = {"device": "cuda", "work": "linear", "shape": "Qwen2.5-7B", "tokens": 8192}
    peer = {**place, "provider": "TRL chunked_logprob", "ms": 60.0, "scalar": False}
    rows = [
        {**place, "provider": "ours", "ms": 40.0, "tflops": 670.0, "mib": 991.0, "scalar": False},
        {**place, "provider": "three GEMMs", "ms": 38.0, "scalar": False},
        {**place, "provider": "ours, half the rows dead", "ms": 27.0, "scalar": False},
        peer,
        {**place, "provider": "QuACK cross-entropy, mean", "not_run": "no module", "case": ""},
    ]
    document = {"device": "Some GPU", "date": "2026-01-02", "rows": rows}
    (results / "some-gpu.json").write_text(json.dumps(document))
    text = table.gpu_table(table.newest("cuda"))
    line = next(x for x in text.splitlines() if x.startswith("| Qwen2.5-7B | 8192 |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "Qwen2.5-7B", "8192", "40.00", "670", "1.05x", "0.68x", "1.50x (TRL chunked_logprob)",
        "not measured", "991",
    ]  # fmt: skip
    table.roofline(document, results / "roofline.png")
    assert (results / "roofline.png").stat().st_size > 10_000
