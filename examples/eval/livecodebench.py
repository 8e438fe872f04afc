"""Convert the published LiveCodeBench files to rows for the code reward.

    python examples/eval/livecodebench.py test6.jsonl $GAC_DATA/livecodebench.jsonl.gz

Reads the files of `livecodebench/code_generation_lite` on the Hugging Face Hub. Their private tests
are base64-encoded, compressed pickles. Unpickling can execute code, so this script never unpickles:
it only scans the opcodes and extracts a single string, the tests as JSON.
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

MAX_BYTES = 1 << 30  # limit per row: a few compressed bytes can expand to any size
_TEXT = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
STDIN_INSTRUCTION = "Write a Python program that reads standard input and writes standard output."
STARTER_CODE_INSTRUCTION = "Complete this Python code:\n\n```python\n{}\n```"
# names that solutions may use without importing them; `plain` makes tuples compare equal to lists
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
    """Decode `text`: either plain JSON, or a base64-encoded, zlib-compressed pickle of one string.

    Raises ValueError for anything else.
    """
    if text.lstrip().startswith("["):
        return text
    inflater = zlib.decompressobj()
    try:
        pickled = inflater.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    except zlib.error as error:
        raise ValueError(
            f"test cases are not zlib-compressed, but the published ones are ({error})"
        ) from error
    if not inflater.eof:
        raise ValueError(f"test cases are truncated, or larger than {MAX_BYTES >> 20} MiB")
    strings: list[str] = []
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name in _TEXT:
            strings.append(str(argument))
        elif instruction.name not in _AROUND:
            raise ValueError(f"unexpected pickle opcode {instruction.name}: expected one string")
    if len(strings) != 1:
        raise ValueError(f"expected a pickle with one string, got {len(strings)}")
    return strings[0]


def convert_row(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert a published row to one with id, prompt and either `cases` or `tests`.

    Raises:
        ValueError: the row is malformed.
    """
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
        return row | {"prompt": f"{row['prompt']}\n\n{STDIN_INSTRUCTION}", "cases": cases}
    if kinds != {"functional"}:
        raise ValueError(f"test types {sorted(kinds)}: expected only stdin or only functional")
    name = json.loads(fields["metadata"])["func_name"]
    statements = []
    for test in tests:
        given = ", ".join(repr(json.loads(line)) for line in test["input"].splitlines())
        expected = json.loads(test["output"])
        statements.append(f"assert plain(Solution().{name}({given})) == {expected!r}")
    prompt = (
        f"{row['prompt']}\n\n{STARTER_CODE_INSTRUCTION.format(fields['starter_code'].rstrip())}"
    )
    return row | {
        "prompt": prompt,
        "tests": statements,
        "setup": SETUP,
        "entry_point": "Solution",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", help="published file to convert, e.g. test6.jsonl")
    parser.add_argument("out", type=Path, help="output file (.jsonl.gz)")
    parser.add_argument(
        "--since",
        default="",
        metavar="YYYY-MM-DD",
        help="only include contests on or after this date",
    )
    options = parser.parse_args()
    count = 0
    try:
        with gzip.open(options.out, "wt", encoding="utf-8") as file:
            for row in read_rows(options.source):
                if str(row.fields.get("contest_date", "")) < options.since:
                    continue
                try:
                    converted = convert_row(dict(row.fields))
                except KeyError as error:
                    raise DataError(f"{row.location}: missing field {error}") from error
                except (ValueError, TypeError, AttributeError, RecursionError) as error:
                    raise DataError(f"{row.location}: {error}") from error
                file.write(json.dumps(converted) + "\n")
                count += 1
    except (ValueError, OSError) as error:
        options.out.unlink(missing_ok=True)
        print(f"livecodebench: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {count} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
