"""Test data: messages that a program writes to every descriptor instead of its answer.

See `test_attacks.py`. All of them are complete frames that claim to answer a call of `add`.
"""

# ruff: noqa: E501 - data
import json

# the items after "value" in the first node, further nodes, class definitions
_ANSWERS = r"""
[true] [] []
[[1]] [["class", ["builtins:int"]]] []
[[1]] [["class", ["builtins:object"]]] []
[[1]] [["class", ["builtins:eval"]]] []
[[1]] [["class", ["builtins:__import__"]]] []
[[1]] [["object", [7, 0]]] []
[[1]] [["object", [true, 1]]] [[1, "int", [], "builtins:int", "", []]]
[[1]] [["object", ["7", 1, 5]]] [[1, "int", [], "builtins:int", "", []]]
[[1]] [["object", [7, 1]]] [[1, "int", [], "builtins:int", "", ["__eq__", "__index__", "__float__"]]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "builtins:object", "", ["__eq__", "__class__", "__array__"]]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "builtins:object", "", ["__radd__", "__rsub__", "__abs__"]]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "builtins:object", "list", ["__eq__", "__len__"]]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "builtins:type", "", ["__call__"]]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "builtins:eval", "", []]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "os:_exit", "", []]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "subprocess:Popen", "", ["__call__"]]]
[[1]] [["object", [7, 2]]] [[1, "B", [], "builtins:int", "", []], [2, "A", [1], "builtins:object", "", []]]
[[1]] [["object", [7, 1]]] [[1, "A", [1], "builtins:object", "", []]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "builtins:int", "", ["__init_subclass__", "__new__"]]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "builtins:int", "", ["real", "mro", "__bases__"]]]
[[1]] [["object", [7, 1]]] [[1, "A\u0000B", [], "builtins:int", "", []]]
[[1]] [["object", [7, 1]]] [[[], "A", [], "builtins:int", "", []]]
[[1]] [["object", [7, 1]]] [[1, 5, [], "builtins:int", "", []]]
[[1]] [["object", [7, 1]]] [[1, "A", [], "builtins:int", "", ["__eq__", "__hash__"]]]
[[1]] [["object", [7, 1, "5", 10]]] [[1, "A", [], "builtins:int", "", ["__sub__", "__eq__"]]]
[[1]] [["object", [7, 1, 5]]] [[1, "A", [], "builtins:tuple", "", []]]
[[1]] [["object", [7, 1, 5, 6]]] [[1, "A", [], "builtins:str", "", []]]
[[1]] [["object", [7, 1, "nan"]]] [[1, "A", [], "builtins:float", "", ["__eq__"]]]
[[1]] [["object", [7, 1, 1]]] [[1, "A", [], "builtins:bool", "", []]]
[[1]] [["object", [7, [2]]], ["list", [0]]] []
[5, [1], 7] [["list", []]] []
[[1], [2], "x"] [["list", []], ["list", []]] []
[[1], [2], [1]] [["list", []], ["list", []]] []
[[1]] [["class", [1]]] [[1, "int", [], "builtins:int", "", ["__eq__"]]]
[[1]] [["class", [1]]] [[1, "A", [], "builtins:BaseException", "", []]]
[[1]] [["class", [1]]] [[1, "A", [], "builtins:StopIteration", "", []]]
[[1]] [["class", ["os:_exit"]]] []
[[1]] [["class", [99]]] []
[[1]] [["class", ["unittest.mock:_ANY"]]] []
[[1]] [["object", [7, "unittest.mock:_ANY"]]] []
[[1]] [["object", [7, 1]]] [[1, "A", ["unittest.mock:_ANY"], "builtins:object", "", []]]
[[1]] [["error", [7, "builtins:ValueError", "x", null]]] []
[[1]] [["error", [7, "builtins:ValueError", "x", null, [2], [3]]], ["list", [5]], ["dict", []]] []
[[1]] [["error", [7, "subprocess:Popen", "x", null, [2], [3]]], ["list", ["id"]], ["dict", []]] []
[[1]] [["instance", ["Case", [2]]], ["dict", ["a", 5]]] []
[[1]] [["instance", ["int", [2]]], ["dict", []]] []
[[1]] [["coroutine", [0]]] []
[[1]] [["coroutine", ["x"]]] []
[[1]] [["lent", [0]]] []
[[1]] [["lent", [true]]] []
[[1]] [["lent", [-1]]] []
[[1]] [["seen", [0]]] []
[[1]] [["seen", [9]]] []
[[1]] [["__init__", []]] []
[[1]] [["list", [[1]]]] []
[[0]] [] []
[[-1]] [["list", []]] []
[[true]] [["list", []]] []
[{}] [] []
[[1]] [["slice", [1, 2, 3]]] []
[[1]] [["Decimal", ["NaN"]]] []
[[1]] [["Decimal", ["1e999999999"]]] []
[[1]] [["range", [0, 281474976710655, 1]]] []
[[1]] [["ndarray", ["<f8", "0000000000001440", 1]]] []
[[1]] [["scalar", ["|O8", "0000000000000000"]]] []
[[1]] [["ndarray", ["<f8", "00", -1]]] []
[[1]] [["defaultdict", [5]]] []
[[1]] [["NotImplementedType", []]] []
[[1]] [["dict", [1]]] []
[[1]] [["set", [[2]]], ["list", []]] []
"""


def _message(line: str) -> str:
    decoder, parts, place = json.JSONDecoder(), [], 0
    while place < len(line):
        part, end = decoder.raw_decode(line, place)
        parts.append(part)
        place = end + 1
    value, nodes, classes = parts
    return json.dumps(
        [classes, [["list", ["value", "", *value, [len(nodes) + 1]]], *nodes, ["list", []]]]
    )


MESSAGES = [_message(line) for line in _ANSWERS.strip().splitlines()]
MESSAGES += ["", "5", "null", "[]", "[[], []]", "{}", "[", "[5, 5]", '[[], [["list", []]]]']
MESSAGES += ['[[], [["list", ["ask", "", 0, null, null]]]]', '[[], [["dict", []]]]']
MESSAGES += ['[[], [["list", ["other", "", 5, null]]]]', '[[5], [["list", []]]]', "NaN"]
MESSAGES += ["[" * 100_000, '[[], [["list", ["value", 5, 5, null]]]]']
