"""Generates the tables of docs/benchmarks.md from the recorded results.

`python -m bench.table` prints the tables of the newest results for each device type and writes them
to docs/benchmarks.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gac.evaluation.table import markdown_table
from tools.pages import BENCHMARKS, fill

from .batches import HEADS
from .record import RESULTS, key

NOT_MEASURED = "not measured"
GPUS = "H100", "H200"
GPU_TOKENS = (2048, 8192, 32768)
WORK = "logits", "linear"
HALF = "ours, half the rows without gradient"
INCOMPLETE = (HALF, "ours, forward only")  # not the whole loss and gradient
Row = dict[str, Any]


def newest(kind: str, name: str = "") -> dict[str, Any] | None:
    """The newest results file that has table rows for `kind` ("cpu" or "cuda").

    Peers that it lacks are added from older files of the same device, with their `date`, if they
    have a time of ours from the same rounds.

    name: a part of the device's name.
    """
    documents = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    of_kind = [
        d
        for d in documents
        if name in d.get("device", "")
        and any(row.get("device") == kind and row.get("work") in WORK for row in d.get("rows", ()))
    ]
    of_kind.sort(key=lambda d: d["date"])
    if not of_kind:
        return None
    *older, last = of_kind
    peers = {
        key(row): {**row, "date": document["date"]}
        for document in older
        for row in document["rows"]
        if document["device"] == last["device"]
        and row.get("ours_ms")
        and not row["provider"].startswith("ours")
    }
    rows = {key(row): row for row in last["rows"]}
    return {**last, "rows": [*rows.values(), *(peers[k] for k in peers if k not in rows)]}


def tables(path: Path) -> str:
    """The tables of one results file."""
    document = json.loads(path.read_text())
    gpu = document["rows"][0]["device"] == "cuda"
    return gpu_table(document) if gpu else cpu_table(document)


def find(rows: Iterable[Row], **fields: Any) -> Row | None:
    """The first row that matches these fields and was run."""
    for row in rows:
        if "not_run" not in row and all(row.get(k) == v for k, v in fields.items()):
            return row
    return None


def number(row: Row | None, field: str, template: str = "{:.2f}") -> str:
    if row is None or row.get(field) is None:
        return NOT_MEASURED
    return template.format(row[field])


def ratio(row: Row | None, other: Row | None) -> str:
    """The time of `other` relative to `row`."""
    if row is None or other is None:
        return NOT_MEASURED
    return f"{other['ms'] / row['ms']:.2f}x"


def providers(rows: list[Row], **fields: Any) -> list[str]:
    """Provider names in file order, without duplicates."""
    names = [r["provider"] for r in rows if all(r.get(k) == v for k, v in fields.items())]
    return list(dict.fromkeys(names))


def cpu_table(document: dict[str, Any] | None) -> str:
    if document is None:
        return f"CPU: {NOT_MEASURED}; run `make bench`."
    rows, parts = document["rows"], [f"{document['device']}, {document['date']}:"]
    for work, title in (
        ("logits", "loss and gradient of given logits"),
        ("linear", "linear layer and loss, with both gradients"),
    ):
        names = providers(rows, work=work)
        if not names:
            continue
        ours, eager = (find(rows, work=work, provider=name) for name in ("ours", "eager"))
        body = []
        for name in names:
            row = find(rows, work=work, provider=name)
            memory = find(rows, work=f"{work} memory", provider=name)
            note = " (scalar only)" if row and row.get("scalar") else ""
            digits = "{:.1f}" if row and row["ms"] < 100 else "{:.0f}"
            body.append(
                [
                    name + note,
                    number(row, "ms", digits),
                    ratio(ours, row),
                    ratio(row, eager),
                    number(memory, "mib", "{:.0f}") if memory else "",
                ]
            )
        first = next(row for row in rows if row["work"] == work)
        shape = f"{title}, {first['tokens']} tokens, {first['shape']}"
        head = f"{shape} | ms | time / ours | speedup over eager | extra MiB"
        parts.append(markdown_table(head.split(" | "), body))
    return "\n\n".join(parts)


def gpu_linear(rows: list[Row]) -> str:
    """Table with one line per shape and number of tokens that ours was measured with."""
    body = []
    for shape in HEADS:
        for tokens in GPU_TOKENS:
            common = {"work": "linear", "shape": shape, "tokens": tokens}
            ours = find(rows, **common, provider="ours")
            if ours is None:
                continue
            gemms = find(rows, **common, provider="three GEMMs")
            half = find(rows, **common, provider=HALF)
            body.append(
                [
                    shape,
                    str(tokens),
                    number(ours, "ms"),
                    number(ours, "tflops", "{:.0f}"),
                    ratio(gemms, ours),
                    ratio(ours, half),
                    number(ours, "mib", "{:.0f}"),
                ]
            )
    head = "head | tokens | ms | TFLOP/s | time / GEMMs | half without gradient / all | extra MiB"
    return markdown_table(head.split(" | "), body) + "\n\n" + gpu_peers(rows)


def gpu_peers(rows: list[Row]) -> str:
    """Table of all losses of a shape, each relative to ours in the same rounds."""
    parts = []
    for shape in HEADS:
        common = {"work": "linear", "shape": shape, "tokens": 8192}
        ours, body = find(rows, **common, provider="ours"), []
        for name in providers(rows, **common):
            row = find(rows, **common, provider=name)
            if row is None or ours is None or name in INCOMPLETE:
                continue
            errors = row.get("errors") or []
            body.append(
                [
                    name
                    + (" (scalar only)" if row.get("scalar") else "")
                    + (f" ({row['date']})" if "date" in row else ""),
                    number(row, "ms"),
                    f"{row['ms'] / (row.get('ours_ms') or ours['ms']):.2f}x",
                    number(row, "mib", "{:.0f}"),
                    " / ".join(f"{error:.1e}" for error in errors[1:]),
                ]
            )
        if body:
            head = f"linear, {shape}, 8192 tokens | ms | time / ours | extra MiB | error of dH / dW"
            parts.append(markdown_table(head.split(" | "), body))
    return "\n\n".join(parts)


def gpu_logits(rows: list[Row]) -> str:
    names = (
        "ours, Triton",
        "ours, Triton, overwrite",
        "ours, csrc",
        "ours, csrc, overwrite",
        "ours, Triton, forward only",
        "ours, csrc, forward only",
        "eager",
        "TRL log-softmax and entropy",
    )
    body = []
    for name in names:
        row = find(rows, work="logits", shape="Qwen2.5-7B", tokens=8192, provider=name)
        share = number(row, "fraction_of_copy", "{:.0%}")
        body.append([name, number(row, "ms"), number(row, "gbs", "{:.0f}"), share])
    head = "given logits, Qwen2.5-7B, 8192 tokens | ms | GB/s | of copy bandwidth"
    return markdown_table(head.split(" | "), body)


def gpu_table(document: dict[str, Any] | None) -> str:
    if document is None:
        return f"GPU: {NOT_MEASURED}; run `make bench-gpu`."
    rows, parts = document["rows"], [f"{document['device']}, {document['date']}, bfloat16:"]
    for work, of_rows in (("linear", gpu_linear), ("logits", gpu_logits)):
        if any(row["work"] == work and "ms" in row for row in rows):
            parts.append(of_rows(rows))
        else:
            parts.append(
                f"{work}: {NOT_MEASURED}; run `python -m pytest bench/bench_gpu_{work}.py`."
            )
    return "\n\n".join(parts)


def main() -> None:
    gpus = [document for name in GPUS if (document := newest("cuda", name))]
    text = "\n\n".join([cpu_table(newest("cpu")), *map(gpu_table, gpus or [None])])
    print(text)
    fill(BENCHMARKS, "kernels", text)


if __name__ == "__main__":
    main()
