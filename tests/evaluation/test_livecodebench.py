"""LiveCodeBench's published format: converted rows grade programs correctly, and pickles are never
executed.
"""

import base64
import json
import os
import pickle
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from examples.eval.livecodebench import unpack
from gac.config import load
from gac.data import load_prompts
from gac.demo.task import make_tokenizer
from gac.evaluation.config import EvalConfig
from gac.rewards import build_reward

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "eval"
STDIN = [{"input": f"{n}\n", "output": f"{2 * n}\n", "testtype": "stdin"} for n in (1, 4)]
CALLS = [
    {"input": '[1, 2]\n"a"', "output": '[1, 2, "a"]', "testtype": "functional"},
    {"input": '[]\n"\\u00e9"', "output": '["\\u00e9"]', "testtype": "functional"},
]


def pack(value, protocol=None):
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def published_row(number, tests, **changes):
    return {
        "question_title": "t",
        "question_content": "A question.",
        "platform": "atcoder",
        "question_id": f"q{number}",
        "contest_id": "c",
        "contest_date": f"2025-0{number}-01T00:00",
        "starter_code": "class Solution:\n    def joined(self, xs: List, x):\n        ",
        "difficulty": "easy",
        "public_test_cases": json.dumps(tests[:1]),
        "private_test_cases": pack(json.dumps(tests[1:])),
        "metadata": json.dumps({"func_name": "joined"}),
        **changes,
    }


def convert(folder, rows, *options):
    source, out = folder / "test6.jsonl", folder / "livecodebench.jsonl.gz"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = subprocess.run(
        [sys.executable, FOLDER / "livecodebench.py", source, out, *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return run, out


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_published_rows_grade_programs(tmp_path, monkeypatch):
    rows = [published_row(1, STDIN), published_row(2, CALLS), published_row(3, STDIN)]
    run, _ = convert(tmp_path, rows, "--since", "2025-01-02")
    assert (run.returncode, run.stdout.split(": ")[1]) == (0, "2 rows\n")
    run, _ = convert(tmp_path, rows)
    monkeypatch.setenv("GAC_DATA", str(tmp_path))
    config = load(EvalConfig, FOLDER / "livecodebench.yaml")
    data = replace(config.tasks["livecodebench"].data, chat=False)  # this tokenizer has no template
    examples = load_prompts(data, make_tokenizer())
    assert [e.id for e in examples] == ["q1", "q2", "q3"]
    assert "standard input" in examples[0].prompt_text
    assert "def joined(self, xs: List, x):" in examples[1].prompt_text
    reward = build_reward(config.reward)
    double = "print(2 * int(input()))"
    method = "class Solution:\n    def joined(self, xs: List, x): return (*xs, x)"
    once = "print(2)"
    wrong = "class Solution:\n    def joined(self, xs, x): return (*xs, 'a')"
    assert reward([double, method, once], examples) == [1.0, 1.0, 0.0]
    assert reward([once, wrong, method], examples) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_strings_are_read_from_every_pickle_protocol(protocol):
    assert unpack(pack('[{"é": "\\n"}]', protocol)) == '[{"é": "\\n"}]'


class Malicious:
    """Creates a directory when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickles_are_never_executed(tmp_path, protocol):
    packed = pack(Malicious(tmp_path / "made"), protocol)
    with pytest.raises(ValueError, match="unexpected pickle opcode"):
        unpack(packed)
    run, out = convert(tmp_path, [published_row(1, STDIN, private_test_cases=packed)])
    assert run.returncode == 2
    assert "test6.jsonl, line 1: unexpected pickle opcode" in run.stderr
    assert not (tmp_path / "made").exists()
    assert not out.exists()


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ("!", "base64"),
        (base64.b64encode(b"not zlib").decode(), "not zlib-compressed"),
        (pack("x" * 99)[:24], "truncated"),
        (base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), "one string, got 0"),
        (base64.b64encode(zlib.compress(b"\x80\x04\x8d" + b"\xff" * 8)).decode(), "byte count"),
        (base64.b64encode(zlib.compress(b"?")).decode(), "opcode"),
    ],
    ids=["base64", "zlib", "short", "empty", "length", "bytes"],
)
def test_damaged_tests_are_reported(packed, message):
    with pytest.raises(ValueError, match=message):
        unpack(packed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"private_test_cases": "[]", "public_test_cases": "[]"}, "test types []"),
        ({"metadata": "{}"}, "missing field 'func_name'"),
        ({"private_test_cases": None}, "line 1: "),
        ({"private_test_cases": json.dumps(STDIN)}, "only stdin or only functional"),
    ],
)
def test_rows_in_another_format_are_reported(tmp_path, changes, message):
    run, _ = convert(tmp_path, [published_row(1, CALLS, **changes)])
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
