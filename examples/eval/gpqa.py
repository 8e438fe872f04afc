"""Convert the published GPQA file to rows for gpqa.yaml.

    python examples/eval/gpqa.py gpqa_diamond.csv $GAC_DATA/gpqa_diamond.jsonl.gz

Reads gpqa_diamond.csv of `Idavidrein/gpqa` on the Hugging Face Hub, which asks for an account, and
shuffles the choices of each question once. Its authors ask not to republish the text.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RIGHT, WRONG = "Correct Answer", tuple(f"Incorrect Answer {i}" for i in (1, 2, 3))


def convert(row: Mapping[str, str], index: int) -> dict[str, Any]:
    """One row; the order of the choices depends only on the question's number."""
    choices = [row[name].strip() for name in (RIGHT, *WRONG)]
    order = random.Random(f"gpqa:{index}").sample(range(4), 4)
    return {
        "id": row.get("Record ID") or str(index),
        "prompt": row["Question"].strip(),
        "choices": [choices[i] for i in order],
        "answer": "ABCD"[order.index(0)],
        "domain": row.get("High-level domain", ""),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and write the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="gpqa_diamond.csv")
    parser.add_argument("out", type=Path, help="the file to write, .jsonl.gz")
    args = parser.parse_args(argv)
    with args.source.open(newline="", encoding="utf-8") as file:
        rows = [convert(row, i) for i, row in enumerate(csv.DictReader(file))]
    with gzip.open(args.out, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"wrote {len(rows)} questions to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
