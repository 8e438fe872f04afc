"""LiveCodeBench's published rows as rows of the code reward.

    python examples/eval/livecodebench.py test6.jsonl $GAC_DATA/livecodebench.jsonl.gz

Reads the files of the hub's `livecodebench/code_generation_lite`. Their private tests are a pickle,
compressed, in base64. A pickle is a program, so none is run here: its instructions are only read,
and nothing but one text, the tests as JSON, is taken.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import pickletools
import sys
import zlib
from pathlib import Path
from typing import Any

from gac.data import read_rows
from gac.errors import DataError

MOST_BYTES = 1 << 30  # of one row's tests: a few bytes may unpack to any number
_TEXT = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
READS = "Write a Python program that reads standard input and writes standard output."
COMPLETES = "Complete this Python code:\n\n```python\n{}\n```"
# what solutions may use without importing it, and the comparison of answers: a tuple is a list
SETUP = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from typing import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
def plain(value): return list(value) if isinstance(value, tuple) else value
"""


def unpack(text: str) -> str:
    """The text in `text`: JSON as it is, else base64 of zlib of a pickle of one text.

    Raises ValueError for anything else.
    """
    if text.lstrip().startswith("["):
        return text
    inflater = zlib.decompressobj()
    try:
        pickled = inflater.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"not compressed as published ({error})") from error
    if not inflater.eof:
        raise ValueError(f"cut short, or more than {MOST_BYTES >> 20} MiB")
    found: list[str] = []
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name in _TEXT:
            found.append(str(argument))
        elif instruction.name not in _AROUND:
            raise ValueError(f"a pickle of more than one text: it has {instruction.name}")
    if len(found) != 1:
        raise ValueError(f"a pickle of {len(found)} texts, not one")
    return found[0]


def converted(fields: dict[str, Any]) -> dict[str, Any]:
    """A row with id, prompt and either `cases` or `tests`; raises ValueError."""
    texts = [unpack(fields[name]) for name in ("public_test_cases", "private_test_cases")]
    tests = [test for text in texts for test in json.loads(text)]
    row = {
        "id": str(fields["question_id"]),
        "prompt": fields["question_content"].strip(),
        **{name: fields.get(name) for name in ("platform", "difficulty", "contest_date")},
    }
    kinds = {test["testtype"] for test in tests}
    if kinds == {"stdin"}:
        cases = [[test["input"], test["output"]] for test in tests]
        return row | {"prompt": f"{row['prompt']}\n\n{READS}", "cases": cases}
    if kinds != {"functional"}:
        raise ValueError(f"tests of {', '.join(sorted(kinds)) or 'no'} type; expected one type")
    name = json.loads(fields["metadata"])["func_name"]
    statements = []
    for test in tests:
        given = ", ".join(repr(json.loads(line)) for line in test["input"].splitlines())
        expected = json.loads(test["output"])
        statements.append(f"assert plain(Solution().{name}({given})) == {expected!r}")
    prompt = f"{row['prompt']}\n\n{COMPLETES.format(fields['starter_code'].rstrip())}"
    return row | {
        "prompt": prompt, "tests": statements, "setup": SETUP, "entry_point": "Solution",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", help="a published file, e.g. test6.jsonl")
    parser.add_argument("out", type=Path, help="the file to write, .jsonl.gz")
    parser.add_argument("--since", default="", metavar="YYYY-MM-DD", help="contests from this day")
    options = parser.parse_args()
    count = 0
    try:
        with gzip.open(options.out, "wt", encoding="utf-8") as file:
            for row in read_rows(options.source):
                if str(row.fields.get("contest_date", "")) < options.since:
                    continue
                try:
                    found = converted(dict(row.fields))
                except KeyError as error:
                    raise DataError(f"{row.place}: no field {error}") from error
                except (ValueError, TypeError, AttributeError, RecursionError) as error:
                    raise DataError(f"{row.place}: {error}") from error
                file.write(json.dumps(found) + "\n")
                count += 1
    except (ValueError, OSError) as error:
        options.out.unlink(missing_ok=True)
        print(f"livecodebench: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {count} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
