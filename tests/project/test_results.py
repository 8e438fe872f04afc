"""Stored results say where they come from, and the pages have the numbers of the stored results."""

import json
from typing import Any

import pytest

import bench.overhead as overhead
import bench.overhead_fsdp as overhead_fsdp
from bench import table
from tools.pages import BENCHMARKS, ROOT

FILES = [
    path
    for folder in ("bench/results", "research/results")
    for path in sorted((ROOT / folder).rglob("*.json*"))
]
IN_HISTORY = {"bases.json", "roofline.json"}  # digests and counts, which are no measurements


def has_origin(entry: Any) -> bool:
    """Whether an entry, or each of those that it consists of, has its commit."""
    if isinstance(entry, dict):
        if entry.get("commit") or entry.get("code"):
            return True
        parts = [part for part in entry.values() if isinstance(part, dict | list)]
        return any(has_origin(part) for part in parts if part)
    return all(map(has_origin, entry))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_stored_result_has_its_commit(path):
    text = path.read_text()
    entries = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else None
    if path.name not in IN_HISTORY:
        assert has_origin(json.loads(text) if entries is None else entries)


def block(name: str) -> str:
    """The part of docs/benchmarks.md that a program wrote."""
    text = BENCHMARKS.read_text()
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0].strip()


def stored(name: str) -> Any:
    path = ROOT / "bench" / "results" / name
    return json.loads(path.read_text())["cases"] if path.exists() else []


def test_the_overhead_table_is_that_of_the_stored_results():
    assert block("overhead") == overhead.table(stored("overhead.json")).strip()


def test_the_table_of_fsdp_is_that_of_the_stored_results():
    assert block("table-14") == overhead_fsdp.table(stored(overhead_fsdp.FILE)).strip()


def test_the_tables_of_the_loss_are_those_of_the_stored_results():
    gpus = [document for name in table.GPUS if (document := table.newest("cuda", name))]
    parts = [table.cpu_table(table.newest("cpu")), *map(table.gpu_table, gpus or [None])]
    assert block("kernels") == "\n\n".join(parts).strip()
