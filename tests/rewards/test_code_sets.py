"""The code reward on real datasets: references pass, and mutants get the same verdicts as with
plain exec.
"""

import ast
import json
import sys
import warnings

import pytest

from gac.data import DataConfig, Example
from gac.data.examples import load_references
from gac.rewards import build_reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

SETS = {
    "humaneval": ({}, 131),
    "mbpp": ({"setup_field": "test_setup_code"}, 779),
}


def references(data_dir, name, limit=None):
    return load_references(
        DataConfig(prompts=str(data_dir / f"{name}.jsonl.gz"), limit=limit, demo_field=None)
    )


def grade(name, pairs):
    reward = build_reward({"name": "code", "timeout": 10, **SETS[name][0]})  # mbpp/123 takes 3 s
    return reward([text for _, text in pairs], [example for example, _ in pairs])


@pytest.mark.parametrize("name", SETS)
def test_references_pass(data_dir, name):
    assert grade(name, references(data_dir, name, limit=20)) == [1.0] * 20


@pytest.mark.slow(reason="grades a data set")
@pytest.mark.full(reason="grades a whole data set")
@pytest.mark.parametrize("name", SETS)
def test_all_references_pass(data_dir, name):
    pairs = references(data_dir, name)
    scores = grade(name, pairs)
    assert [example.id for (example, _), s in zip(pairs, scores, strict=True) if s != 1.0] == []
    assert len(scores) == SETS[name][1]


class Wrong(ast.NodeTransformer):
    """Makes every `return` return a string that no test expects."""

    def visit_Return(self, node):
        return ast.Return(ast.Constant("no test expects this"))


class Swapped(ast.NodeTransformer):
    """Swaps operators: + and -, * and //, < and >=, == and !=."""

    PAIRS = (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.Lt, ast.GtE), (ast.Eq, ast.NotEq)
    TABLE = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}  # noqa: RUF012 - a constant

    def visit_BinOp(self, node):
        self.generic_visit(node)
        node.op = self.TABLE.get(type(node.op), type(node.op))()
        return node

    def visit_Compare(self, node):
        self.generic_visit(node)
        node.ops = [self.TABLE.get(type(op), type(op))() for op in node.ops]
        return node


def mutant(kind, example, text):
    """The mutated reference solution. HumanEval's reference is only the body of the prompt's
    function.
    """
    source = example.extra["prompt"] + text if "entry_point" in example.extra else text
    with warnings.catch_warnings(action="ignore"):  # invalid escape sequences in the program
        tree = ast.parse(source)
    return ast.unparse(ast.fix_missing_locations(kind().visit(tree)))


def plain_script(example, program):
    """A plain exec grader: program, setup and tests run in one process, and its exit status is the
    verdict.
    """
    parts = [program, example.extra.get("test_setup_code", ""), *example.extra["tests"]]
    if "entry_point" in example.extra:
        parts.append(f"check({example.extra['entry_point']})")
    texts = json.dumps(parts)
    return f"import json\nspace = {{}}\nfor text in json.loads({texts!r}): exec(text, space)"


def verdicts(name, kind, pairs):
    """Return (our scores, plain exec's scores) for the mutated references."""
    reward = build_reward({"name": "code", "timeout": 2, **SETS[name][0]})
    examples = [example for example, _ in pairs]
    programs = [mutant(kind, example, text) for example, text in pairs]
    scripts = [Example("x", (), "", None, None, {"cases": [["", ""]]}) for _ in pairs]
    quiet = [
        "import io, sys\nsys.stdout = io.StringIO()\n" + plain_script(*pair)
        for pair in zip(examples, programs, strict=True)
    ]
    return reward(programs, examples), reward(quiet, scripts)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", [Wrong, Swapped], ids=lambda kind: kind.__name__)
def test_mutants_fail_as_under_plain_exec(data_dir, name, kind):
    ours, plain = verdicts(name, kind, references(data_dir, name, limit=20))
    # the other programs contain no such operator
    assert ours == plain
    assert ours.count(0.0) >= 8


@pytest.mark.slow(reason="grades a data set")
@pytest.mark.full(reason="grades a whole data set")
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", [Wrong, Swapped], ids=lambda kind: kind.__name__)
def test_all_mutants_fail_as_under_plain_exec(data_dir, name, kind):
    pairs = references(data_dir, name)
    ours, plain = verdicts(name, kind, pairs)
    differ = [
        (example.id, a, b) for (example, _), a, b in zip(pairs, ours, plain, strict=True) if a != b
    ]
    # this mutant calls exit(), which fools a grader that looks at the exit status
    assert differ == ([("mbpp/264", 0.0, 1.0)] if (name, kind) == ("mbpp", Swapped) else [])
    assert kind is not Wrong or set(ours) == {0.0}
