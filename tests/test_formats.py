"""Data formats: JSON, CSV, parquet, arrow, folders, conversations, several sources."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from gac.config import ConfigError, load
from gac.data import DataConfig, DataError, load_demos, load_prompts, read_rows
from gac.data.examples import load_references, prompt_order
from gac.data.order import MixedOrder
from gac.demo.task import make_tokenizer

ROWS = [{"prompt": f"+{i}1=", "answer": f"{i}.", "solution": f"{i}.0"} for i in range(4)]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def chat_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path: Path) -> str:
    """Write ROWS in the format of the suffix."""
    if path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")
        table = datasets.Dataset.from_list(ROWS)
        if path.suffix == ".parquet":
            table.to_parquet(path)
        else:
            table.save_to_disk(path.with_suffix(""))
            (path.with_suffix("") / "data-00000-of-00001.arrow").rename(path)
    return str(path)


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet", ".arrow"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    source = write(tmp_path / f"data{suffix}")
    assert [dict(row.fields) for row in read_rows(source)] == ROWS


def test_a_folder_of_data_files(tmp_path):
    write(tmp_path / "train.parquet")
    assert [dict(row.fields) for row in read_rows(str(tmp_path))] == ROWS


def test_json_lines_in_a_json_file(tmp_path):
    (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [dict(row.fields) for row in read_rows(str(tmp_path / "a.json"))] == ROWS


def test_rows_of_a_saved_dataset_name_their_split(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "d")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "e")
    assert next(iter(read_rows(f"{tmp_path}/d:train"))).location.startswith(
        f"{tmp_path}/d:train, line 1"
    )
    assert next(iter(read_rows(f"{tmp_path}/e"))).location.startswith(f"{tmp_path}/e, line 1")


def test_references_have_the_ids_of_their_rows(tmp_path):
    rows = [{"id": "r0", **ROWS[0]}, ROWS[1]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    references = load_references(DataConfig(prompts=str(tmp_path / "a.jsonl")))
    assert [example.id for example, _ in references] == ["r0", f"{tmp_path}/a.jsonl, line 2"]
    assert [example.prompt_text for example, _ in references] == [row["prompt"] for row in ROWS[:2]]


def test_sources_are_visited_in_proportion_to_their_weights(tokenizer, tmp_path):
    sources = []
    for name, count, weight in (("a", 3, 3.0), ("b", 4, 1.0)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:count]))
        sources.append({"path": str(path), "name": name, "weight": weight})
    config = load(DataConfig, {"sources": sources})
    prompts = load_prompts(config, tokenizer)
    order = prompt_order(config, prompts, 0)
    drawn = [prompts[i].source for i in order.take(40)]
    assert Counter(drawn) == {"a": 30, "b": 10}


def test_a_json_object_with_one_list(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({"rows": ROWS}))
    assert len(list(read_rows(str(tmp_path / "data.json")))) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1]", "a.json, row 1: expected an object, found int"),
        ("a.json", "[{]", "a.json, line 1: not valid JSON"),
        ("a.csv", "prompt,answer\n1\n", "a.csv, row 2: the number of fields differs from the 2"),
        ("a.csv", "prompt,answer\n1,2,3\n", "a.csv, row 2: the number of fields differs from"),
        ("a.parquet", "x", "a.parquet: not a valid parquet file"),
    ],
)
def test_invalid_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        list(read_rows(str(tmp_path / name)))


def conversation(tmp_path: Path, *rows: dict) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "0"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"messages": [SYSTEM, USER], "solution": "2"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": "2"},
        {"prompt": [USER], "solution": "2"},
    ],
)
def test_conversations(tmp_path, chat_tokenizer, row):
    source = conversation(tmp_path, row)
    config = DataConfig(prompts=source, answer_field=None, system="0")
    (prompt,) = load_prompts(config, chat_tokenizer)
    (demo,) = load_demos(config, chat_tokenizer)
    assert prompt.prompt_text == demo.prompt_text == "s:0;u:1+1;a:"
    assert chat_tokenizer.decode(demo.demo) == "2<eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": []}, "field 'prompt': expected a list of messages"),
        ({"prompt": [{"role": "user"}]}, "message 1 needs `role` and `content`"),
        ({"prompt": [USER], "completion": [USER]}, "one assistant message"),
    ],
)
def test_invalid_conversations(tmp_path, chat_tokenizer, row, message):
    config = DataConfig(prompts=conversation(tmp_path, row), answer_field=None)
    with pytest.raises(DataError, match=message):
        load_prompts(config, chat_tokenizer)


def test_a_conversation_needs_a_chat_template(tmp_path, tokenizer, chat_tokenizer):
    config = DataConfig(prompts=conversation(tmp_path, {"messages": [USER]}), answer_field=None)
    with pytest.raises(DataError, match=r"needs a chat template, .* set model\.tokenizer"):
        load_prompts(config, tokenizer)
    chat_tokenizer.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(DataError, match=r"the chat template rejects it \(no users\)"):
        load_prompts(config, chat_tokenizer)


def test_several_sources(tmp_path, tokenizer):
    first, second = write(tmp_path / "a.json"), write(tmp_path / "b.csv")
    sources = [{"path": first, "name": "a", "weight": 3}, {"path": second}]
    config = load(DataConfig, {"sources": sources})
    assert Counter(e.source for e in load_prompts(config, tokenizer)) == {"a": 4, second: 4}
    assert len(load_demos(config, tokenizer)) == 8
    unnamed = load(DataConfig, {"sources": [{"path": first}, {"path": second}]})
    assert {demo.source for demo in load_demos(unnamed, tokenizer)} == {first, second}
    with pytest.raises(ConfigError, match="either prompts or sources"):
        load(DataConfig, {"sources": sources, "prompts": first})


def test_mixed_order_keeps_the_shares_and_resumes():
    order, resumed = MixedOrder([10, 2], [3, 1], 0), MixedOrder([10, 2], [3, 1], 0)
    taken = order.take(40)
    assert sum(index >= 10 for index in taken) == 10
    assert sorted(i for i in taken[:13] if i < 10) == list(range(10))
    resumed.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert resumed.take(9) == order.take(9)
