"""Write the demonstrations and the prompts of examples/openr1_math.yaml.

    python examples/openr1_math.py $GAC_DATA            # requires the extra `hub`

Draws 5,000 rows with a demonstration and 20,000 other rows as prompts from
open-r1/OpenR1-Math-220k, as the paper does (arXiv 2605.26184, section 4.1); which rows it drew is
not published. A demonstration is the first reasoning trace that is complete and that math-verify
found correct.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gac.data import read_rows

SOURCE = "open-r1/OpenR1-Math-220k:train"


def trace(row: Mapping[str, Any]) -> str | None:
    """The first complete and correct trace of a row."""
    lists = row["generations"], row["is_reasoning_complete"], row["correctness_math_verify"]
    for text, complete, correct in zip(*(values or () for values in lists), strict=False):
        if complete and correct:
            return str(text)
    return None


def usable(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """The rows with an answer and a trace, once per problem."""
    seen = set()
    for row in rows:
        problem, text = row["problem"], trace(row)
        if row["answer"] and text is not None and problem not in seen:
            seen.add(problem)
            answer = str(row["answer"])
            yield {"id": row["uuid"], "prompt": problem, "answer": answer, "solution": text}


def split(
    rows: Sequence[dict[str, str]], demos: int, prompts: int, seed: int = 0
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Disjoint random samples: `demos` rows with and `prompts` rows without the solution.

    Raises ValueError if there are too few rows.
    """
    if len(rows) < demos + prompts:
        raise ValueError(f"{len(rows)} usable rows: use at most as many demos and prompts")
    drawn = random.Random(seed).sample(range(len(rows)), demos + prompts)
    without = ("id", "prompt", "answer")
    chosen = [rows[i] for i in drawn[:demos]]
    return chosen, [{key: rows[i][key] for key in without} for i in drawn[demos:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and write both files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the files")
    parser.add_argument("--source", default=SOURCE, help="the dataset, or a file of its rows")
    parser.add_argument("--demos", type=int, default=5000)
    parser.add_argument("--prompts", type=int, default=20000)
    args = parser.parse_args(argv)
    rows = list(usable(row.fields for row in read_rows(args.source)))
    files = zip(("demos", "prompts"), split(rows, args.demos, args.prompts), strict=True)
    for name, chosen in files:
        path = args.folder / f"openr1_{name}.jsonl.gz"
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in chosen)
        print(f"wrote {len(chosen)} rows to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
