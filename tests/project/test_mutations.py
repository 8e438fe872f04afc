"""The changes of `make mutants`, and the page that it writes."""

from tools import mutants, native_mutants
from tools.mutations import all_mutants, changes

TEXT = """
def f(a, b=2):
    \"\"\"Docstring.\"\"\"
    if a < b and not g(a, b):
        a.x = max(a, b) + 1
    é = "é", f"{a + 1}"; return h(a, key=b)[a:]
"""


def test_each_change_is_valid_and_described() -> None:
    found = changes(TEXT)
    assert {(change.before, change.after) for change in found} >= {
        ("2", "3"),
        ("2", "1"),
        ("a < b", "a <= b"),
        ("a < b", "a >= b"),
        ("a < b and not g(a, b)", "a < b or not g(a, b)"),
        ("a < b and not g(a, b)", "without a < b"),
        ("a < b and not g(a, b)", "not (a < b and (not g(a, b)))"),
        ("not g(a, b)", "g(a, b)"),
        ("g(a, b)", "swap to b, a"),
        ("a.x = max(a, b) + 1", "pass"),
        ("max(a, b)", "min"),
        ("max(a, b) + 1", "max(a, b) - 1"),
        ("h(a, key=b)", "without key"),
        ("a:", "a + 1:"),
    }
    assert all(change.scope == "f" for change in found)
    for change in found:
        compile(TEXT[: change.start] + change.new + TEXT[change.end :], "changed", "exec")
        assert " ".join(TEXT[change.start : change.end].split()) == change.before
    (sliced,) = (c for c in found if c.before == "a:")  # columns are in bytes
    assert sliced.lines == (6, 6)


NATIVE = """
#define SIZE 1
template <int kWidth>  // a < b
int f(const float* row, int count) {
  static_assert(kWidth == 4);
  if (count > 2 && !h(row)) return 3;
  row[count] = g(count, row) ? -1.5f : *row;
}
"""


def test_changes_of_native_code() -> None:
    results = {NATIVE[:a] + new + NATIVE[b:] for a, b, new, _ in native_mutants.changes(NATIVE)}
    before = NATIVE.splitlines()
    assert {x.strip() for text in results for x in text.splitlines() if x not in before} == {
        "if (count >= 2 && !h(row)) return 3;",
        "if (count <= 2 && !h(row)) return 3;",
        "if (count > 2 || !h(row)) return 3;",
        "if (count > 2) return 3;",
        "if (!h(row)) return 3;",
        "if (!(count > 2 && !h(row))) return 3;",
        "if (count > 2 && h(row)) return 3;",
        "if (count > (2 + 1) && !h(row)) return 3;",
        "if (count > (2 - 1) && !h(row)) return 3;",
        "if (count > 2 && !h(row)) return (3 + 1);",
        "if (count > 2 && !h(row)) return (3 - 1);",
        "{}",
        "row[count] = g(row, count) ? -1.5f : *row;",
        "row[count] = g(count, row) ? *row: -1.5f ;",
        "row[count] = g(count, row) ? 1.5f : *row;",
        "row[count] = g(count, row) ? -(1.5f + 1) : *row;",
    }


def test_table_counts_the_latest_results_and_the_first() -> None:
    def record(key: str, outcome: str) -> dict:
        return {"module": "control", "key": key, "outcome": outcome}

    present = all_mutants("control")[0].key
    records = [
        record("a", "killed"),
        record("b", "survived"),
        record("c", "survived"),
        record("d", "killed"),
        record(present, "survived"),
        record("its code has changed", "survived"),
        record("b", "killed") | {"again": True},
    ]
    text = mutants.table(records, {"c": "no effect"})
    assert "| control | 6 | 2 of 5 | 2 of 5 | 3 | 1 | 1 | 75.0% |" in text
    assert text.endswith(f"\n\n- survived: `{present}`")
