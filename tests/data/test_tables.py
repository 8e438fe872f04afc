"""The same rows give the same tokens and answers in every format."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from gac.data import DataConfig, DataError, load_demos, load_prompts
from gac.data.source import table_row
from gac.integrations.demonstrations import tokenized
from tests.data.templates import QWEN3, byte_tokenizer

datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")

FORMATS = ("rows.jsonl", "rows.json", "rows.parquet", "saved")


def call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "+".join(arguments), "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


USER = {"role": "user", "content": "2+2="}
# each row has fields that another one lacks
CONVERSATIONS = [
    {"messages": [USER, call(x="1")], "tools": [tool("x", x={"type": "string"})]},
    {
        "messages": [USER, call(y="2")],
        "tools": [tool("y", y={"type": "string", "description": "number"})],
    },
    {"messages": [USER, {"role": "assistant", "content": "4"}]},
    {"messages": [USER, {"role": "assistant", "content": "4", "reasoning_content": "add"}]},
    {"messages": [USER, call(n=3)], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER, call(n=0.5)]},
    {"prompt": [USER], "completion": [call(deep={"list": [{"a": 1}, {"b": 2.5}]})]},
    {"prompt": [USER], "completion": [{"role": "assistant", "content": "4"}]},
]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / name
    if path.suffix in (".jsonl", ".json"):
        lines = [json.dumps(row) for row in rows]
        text = "\n".join(lines) if path.suffix == ".jsonl" else f"[{','.join(lines)}]"
        path.write_text(text)
        return str(path)
    if path.suffix in (".csv", ".tsv"):
        names = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, delimiter=",\t"[path.suffix == ".tsv"])
            writer.writeheader()
            writer.writerows(
                {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()}
                for row in rows
            )
        return str(path)
    pyarrow = pytest.importorskip("pyarrow")
    table = datasets.Dataset(pyarrow.Table.from_pylist(rows, schema(pyarrow, rows)))
    if path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(path)
    return str(path)


def schema(pyarrow: Any, rows: list[dict[str, Any]]) -> Any:
    """The schema of all rows; columns of integers and floats are floats."""
    schemas = [pyarrow.Table.from_pylist([row]).schema for row in rows]
    return pyarrow.unify_schemas(schemas, promote_options="permissive")


def tokens(path: str, **options: Any) -> list[tuple[Any, ...]]:
    config = DataConfig(prompts=path, **{"answer_field": None, **options})
    tokenizer = byte_tokenizer(QWEN3)
    return [
        (e.prompt_text, tokenizer.decode(e.demo), e.prompt, e.demo, e.answer)
        for e in load_demos(config, tokenizer)
    ]


@pytest.mark.parametrize("name", FORMATS[1:])
def test_conversations_have_the_tokens_of_json_lines(tmp_path: Path, name: str) -> None:
    expected = tokens(write(tmp_path, "rows.jsonl", CONVERSATIONS))
    assert '"arguments": {"x": "1"}' in expected[0][1]
    assert '"arguments": {"n": 3}' in expected[4][1]
    assert tokens(write(tmp_path, name, CONVERSATIONS)) == expected


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_conversations_in_csv_are_json_text(tmp_path: Path, name: str) -> None:
    rows = CONVERSATIONS[:6]
    expected = tokens(write(tmp_path, "rows.jsonl", rows))
    assert tokens(write(tmp_path, name, rows)) == expected
    (tmp_path / "bad.csv").write_text('messages\n"[{"\n')
    with pytest.raises(DataError, match="'messages': expected a list of messages"):
        tokens(str(tmp_path / "bad.csv"))


def test_gac_trainers_dataset_is_a_table(tmp_path: Path) -> None:
    expected = tokens(write(tmp_path, "rows.jsonl", CONVERSATIONS))
    path = write(tmp_path, "saved", CONVERSATIONS)
    rows = datasets.load_from_disk(path)
    for part, columns in ((slice(6), ["messages"]), (slice(6, 8), ["prompt", "completion"])):
        chosen = rows.select(range(8)[part])
        chosen = chosen.select_columns([*columns, "tools", "chat_template_kwargs"])
        encoded = tokenized(chosen, "demos", byte_tokenizer(QWEN3))
        assert [(tuple(row["ids"]), row["start"]) for row in encoded] == [
            ((*prompt, *demo), len(prompt)) for _, _, prompt, demo, _ in expected[part]
        ]


ANSWERS = [
    {"prompt": "a", "solution": "b", "answer": 5, "level": 1, "choices": [1, 2]},
    {"prompt": "c", "solution": "d", "answer": -7, "level": 2, "choices": [1, 2.5]},
    {"prompt": "e", "solution": "f", "answer": 0.5, "level": 0.25, "choices": [3]},
]


@pytest.mark.parametrize("name", [*FORMATS[1:], "floats.parquet", "rows.csv"])
def test_integers_stay_integers(tmp_path: Path, name: str) -> None:
    rows = [dict(row) for row in ANSWERS]
    fields = "{level} {prompt}"
    if name == "rows.csv":
        rows = [{k: v for k, v in row.items() if k != "choices"} for row in rows]
    else:
        fields += " {choices}"
    expected = tokens(write(tmp_path, "rows.jsonl", rows), answer_field="answer", template=fields)
    assert [row[-1] for row in expected] == ["5", "-7", "0.5"]
    assert expected[0][0].startswith("1 a")
    path = write(tmp_path, name, rows)
    assert tokens(path, answer_field="answer", template=fields) == expected


def test_columns_of_pandas_with_a_missing_number(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [{"prompt": "a", "answer": 5, "n": 2}, {"prompt": "b", "answer": 6, "n": None}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    config = DataConfig(prompts=str(tmp_path / "rows.parquet"), demo_field=None)
    examples = load_prompts(config, byte_tokenizer())
    assert [example.answer for example in examples] == ["5", "6"]
    assert [example.extra["n"] for example in examples] == [2, None]
    with pytest.raises(DataError, match="row 2, field 'n': is null, but the template"):
        load_prompts(
            DataConfig(prompts=config.prompts, demo_field=None, template="{prompt}{n}"),
            byte_tokenizer(),
        )


def test_what_a_schema_adds_is_removed() -> None:
    row = {"a": None, "b": {"c": None, "d": [None, 1.0, {"e": math.nan, "f": 2.5}]}, "g": math.nan}
    assert table_row(row) == {"a": None, "b": {"d": [None, 1, {"f": 2.5}]}, "g": None}
    numbers = table_row({"a": 1.0, "b": 2.0**60, "c": True, "d": math.inf})
    assert [type(x) for x in numbers.values()] == [int, float, bool, float]


@pytest.mark.parametrize("pattern", [r"^#### (.+)$", r"(?m)^#### (.+)$", r"^answer: (\S+)"])
def test_the_answers_pattern_is_multiline_as_a_rewards(tmp_path: Path, pattern: str) -> None:
    from gac.rewards.text import ExactReward

    row = {"prompt": "a", "answer": "1+2\nanswer: 3\n#### 3\n"}
    path = write(tmp_path, "rows.jsonl", [row])
    (example,) = load_prompts(DataConfig(prompts=path, answer_pattern=pattern), byte_tokenizer())
    assert example.answer == "3"
    reward = ExactReward(answer_pattern=pattern)
    assert reward.score(row["answer"], example) == 1.0
