"""Tests of the benchmark code at tiny sizes: correctness checks, result rows, tables."""

import importlib
import json
import pkgutil
import sys

import pytest
import torch

import bench
from bench import bench_gpu_linear, bench_gpu_logits, gemm_probe, row_case, smoke, table
from bench import record as record_module
from bench.batches import Head, linear_batch
from bench.bench_gpu_linear import FORWARD, GEMMS, HALF
from bench.bench_gpu_linear import compare as compare_linear
from bench.linear_losses import Provider, eager, errors, ours, truth
from bench.record import Record
from bench.timing import runnable

CPU = torch.device("cpu")


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    for module in (bench_gpu_linear, bench_gpu_logits):  # tested below, in a subprocess
        monkeypatch.setattr(module, "unavailable_reason", lambda *_: None)
    return tmp_path


def test_every_benchmark_can_be_imported() -> None:
    for module in pkgutil.walk_packages(bench.__path__, "bench."):
        importlib.import_module(module.name)


def test_gpu_linear_bench_runs_on_a_cpu(results, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every provider available on a CPU agrees with float64, and each one records a row.

    Leaves out the one that compiles for many seconds; test_peers.py runs it.
    """
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    record = Record()
    best = compare_linear(record, CPU, "tiny", Head(64, 500), 512, seconds=0)
    assert {GEMMS, HALF, FORWARD, "ours", "eager"} <= best.keys()
    assert all(ms > 0 for ms in best.values())
    rows = {row["provider"]: row for row in record.rows}
    assert rows["ours"]["logp_error"] < 2e-4
    assert len(rows["ours"]["errors"]) == 3
    for name in rows.keys() - best.keys():
        assert rows[name]["not_run"], f"{name} was not run, and its row gives no reason"


def test_gpu_logits_bench_runs_on_a_cpu(results, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out our Triton kernels and TRL's, which would take minutes in the interpreter."""
    monkeypatch.setattr(bench_gpu_logits, "BACKENDS", {"ours, csrc": "native"})
    monkeypatch.setitem(sys.modules, "trl.kernels.logprob_entropy", None)
    record = Record()
    best = bench_gpu_logits.compare(record, CPU, "tiny", 512, 300, bandwidth=10.0, seconds=0)
    assert {"copy", "eager"} <= best.keys()
    assert all("ms" in row or row["not_run"] for row in record.rows)


def test_a_failing_step_is_excluded_with_its_error() -> None:
    def fails() -> None:
        raise RuntimeError("out of memory\nand more")

    failed: dict[str, str] = {}
    assert runnable({"peer": fails, "other": lambda: None}, failed).keys() == {"other"}
    assert failed == {"peer": "RuntimeError: out of memory"}


def test_a_provider_with_wrong_gradients_is_excluded(
    results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds for our own loss too. The other providers are still timed."""
    monkeypatch.setattr(bench_gpu_linear, "ours", lambda b, **_: 1.5 * ours(b))
    monkeypatch.setattr(
        bench_gpu_linear,
        "providers",
        lambda *_: ({"ours": Provider(lambda b: 1.5 * ours(b)), "eager": Provider(eager)}, {}),
    )
    record = Record()
    best = compare_linear(record, CPU, "tiny", Head(32, 100), 512, seconds=0)
    assert best.keys() >= {GEMMS, "eager"}
    assert not best.keys() & {"ours", HALF, FORWARD}
    rows = {row["provider"]: row for row in record.rows}
    assert rows["ours"]["not_run"].startswith("gradients are off by")
    assert "ours is skipped" in capsys.readouterr().out
    bench_gpu_linear.report("tiny", record.rows)
    assert "ours                                     not run: gradients" in capsys.readouterr().out


def test_a_loss_with_wrong_gradients_is_excluded(results, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"eager": lambda b: 1.01 * bench_gpu_logits.eager(b), "copycat": bench_gpu_logits.eager}
    monkeypatch.setattr(bench_gpu_logits, "losses", lambda _: (wrong, {}))
    record = Record()
    best = bench_gpu_logits.compare(record, CPU, "tiny", 512, 300, bandwidth=10.0, seconds=0)
    assert best.keys() == {"copy", "copycat"}
    assert record.rows[-1]["provider"] == "eager"
    assert "not" in record.rows[-1]["not_run"]


def test_splits_that_can_hold_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 rows of 152064 logits fit eight blocks of 14 tiles each, but not of 9."""
    chosen = []

    def run() -> None:
        chosen.append(bench_gpu_logits.cuda.split(1, torch.float32, keep_row=True))

    halves = bench_gpu_logits.splits(run, 152064, torch.bfloat16)
    assert "8 blocks x 9 tiles" in halves
    assert "2 blocks x 28 tiles" in halves
    floats = bench_gpu_logits.splits(run, 152064, torch.float32)
    assert floats.keys() == {"4 blocks x 28 tiles", "8 blocks x 14 tiles", "8 blocks x 28 tiles"}
    floats["8 blocks x 14 tiles"]()
    assert chosen == [(8, 14)]


def test_unsupported_gemms_are_reported() -> None:
    """CPUs have no bfloat16 GEMM with float32 output."""
    record = Record()
    speeds = gemm_probe.probe(record, "tiny", Head(16, 48), 8, CPU, seconds=0)
    assert speeds["dX, bfloat16"] > 0
    assert len(record.rows) == 8
    assert all("ms" in row or row["not_run"] for row in record.rows)


def test_row_case_accepts_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--backend", "reference", "--device", "cpu", "--rows", "16", "--vocab", "11"]
    for options in ("--dtype float32", "--overwrite", "--dtype float32 --overwrite"):
        row_case.main([*common, *options.split()])
    assert capsys.readouterr().out.count("done") == 3


def test_results_are_copied_out(results, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    record = Record()
    record.add(device="cpu", work="w", shape="s", tokens=1, case="c", provider="a", ms=1.0)
    (path,) = record.save()
    assert (out / path.name).read_bytes() == path.read_bytes()


def test_backends_are_smoke_tested_in_a_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    # for the child process: without the interpreter, Triton finds no device
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("GAC_BENCH_DRY_RUN", "1")
    assert smoke.unavailable_reason("reference", "cpu") is None
    assert "0.1 s" in smoke.unavailable_reason("reference", "cpu", seconds=0.1)
    loaded = smoke.backends.load("triton", torch.device("cpu"))
    monkeypatch.setattr(loaded, "unavailable", lambda *_: None)
    assert "on 'cpu'" in smoke.unavailable_reason("triton", "cpu")


def test_a_wrong_loss_is_detected() -> None:
    batch = linear_batch(512, Head(32, 100), torch.float32, CPU)
    assert max(errors(ours, truth, batch)) < 1e-5
    assert min(errors(lambda b: 1.01 * ours(b), truth, batch)) > 0.009


def test_saving_replaces_only_matching_rows(results) -> None:
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


def test_tables_without_results_say_not_measured(results) -> None:
    assert table.cpu_table(table.newest("cpu")).startswith("CPU: not measured")
    assert table.gpu_table(table.newest("cuda")) == "GPU: not measured; run `make bench-gpu`."


def test_table_contains_the_measured_values(results) -> None:
    key = {"device": "cuda", "work": "linear", "shape": "Qwen2.5-7B", "tokens": 8192}
    peer = {**key, "provider": "TRL chunked_logprob", "ms": 60.0, "scalar": False}
    rows = [
        {**key, "provider": "ours", "ms": 40.0, "tflops": 670.0, "mib": 991.0, "scalar": False},
        {**key, "provider": "three GEMMs", "ms": 38.0, "scalar": False},
        {**key, "provider": HALF, "ms": 27.0, "scalar": False},
        peer,
        {**key, "provider": "QuACK cross-entropy, mean", "not_run": "no module", "case": ""},
    ]
    earlier = ({**peer, "provider": name, "ours_ms": 50.0} for name in (peer["provider"], "CCE"))
    for date, measured in (("2026-01-01", [*earlier]), ("2026-01-02", rows)):
        (results / f"{date}.json").write_text(
            json.dumps({"device": "Some GPU", "date": date, "rows": measured})
        )
    text = table.gpu_table(table.newest("cuda"))
    assert "| 2048 |" not in text, "shapes that were not measured must not get a table row"
    assert "logits: not measured; run `python -m pytest bench/bench_gpu_logits.py`." in text
    assert "| CCE (2026-01-01) | 60.00 | 1.20x |" in text
    assert text.count(peer["provider"]) == 1
    assert "| TRL chunked_logprob | 60.00 | 1.50x |" in text
    assert "| Qwen2.5-7B | 8192 | 40.00 | 670 | 1.05x | 0.68x | 991 |" in text
