"""Data formats: JSON, CSV, parquet, arrow, folders, conversations, several sources."""

import bz2
import csv
import gzip
import json
import lzma
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from gac.config import load
from gac.data import DataConfig, DataError, load_demos, load_prompts, read_rows
from gac.data.config import Source
from gac.data.examples import load_references, prompt_order
from gac.data.source import SourceRow, data_files
from gac.demo.task import make_tokenizer
from gac.errors import ConfigError, MissingData
from gac.order import MixedOrder, Order

ROWS = [
    {"prompt": f"+{i}1=", "answer": f"{i}.", "solution": f"{i}.0", "note": note}
    for i, note in enumerate(("\u00fc,\t;", None, '"x"\r\ny', "z"))
]
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def chat_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path: Path) -> str:
    """Write ROWS in the format of the suffixes."""
    if path.suffix in (".parquet", ".arrow"):
        datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")
        table = datasets.Dataset.from_list(ROWS)
        if path.suffix == ".parquet":
            table.to_parquet(path)
        else:
            table.save_to_disk(path.with_suffix(""))
            (path.with_suffix("") / "data-00000-of-00001.arrow").rename(path)
        return str(path)
    opener = OPENERS.get(path.suffix, open)
    # with a byte order mark, as spreadsheet programs write
    with opener(path, "wt", newline="", encoding="utf-8-sig") as file:
        if ".json" in path.suffixes:
            json.dump(ROWS, file, indent=1)
        elif ".ndjson" in path.suffixes:
            file.writelines(json.dumps(row) + "\n" for row in ROWS)
        else:
            writer = csv.DictWriter(file, ROWS[0], delimiter=",\t"[".tsv" in path.suffixes])
            writer.writeheader()
            writer.writerows(ROWS)
    return str(path)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder in which `datasets` keeps copies."""
    datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "name",
    [
        "a.json",
        "a.json.gz",
        "a.ndjson.bz2",
        "a.ndjson",
        "a.csv",
        "a.csv.gz",
        "a.tsv.xz",
        "a.parquet",
        "a.arrow",
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, cache):
    rows = list(read_rows(write(tmp_path / name)))
    assert [dict(row.fields) for row in rows] == ROWS
    first = 2 if ".csv" in name or ".tsv" in name else 1  # after the header
    unit = "line" if ".ndjson" in name else "row"
    expected = [f"{tmp_path}/{name}, {unit} {number}" for number in range(first, first + 4)]
    assert [row.location for row in rows] == expected
    assert not list(cache.rglob("*.arrow"))


def test_compression_is_recognized_by_content(tmp_path):
    """Whatever the name says; Zstandard with pyarrow."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `hub`")
    lines = "".join(json.dumps(row) + "\n\n" for row in ROWS).encode()  # with empty lines
    with pyarrow.output_stream(tmp_path / "a.jsonl.zst", "zstd") as file:
        file.write(lines)
    (tmp_path / "b.jsonl").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.gz").write_bytes(lines)
    for path in tmp_path.iterdir():
        rows = list(read_rows(str(path)))
        assert [dict(row.fields) for row in rows] == ROWS
        assert [row.number for row in rows] == [1, 3, 5, 7]


def test_blanks_after_the_separators_of_a_header(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f'prompt, answer\n{"1+1" * 99_999}, "2, or two"\n')  # a cell of any length
    (row,) = read_rows(str(path))
    assert row.fields == {"prompt": "1+1" * 99_999, "answer": "2, or two"}
    path.write_text("prompt,answer\n1+1, 2\n")  # a part of the text
    (row,) = read_rows(str(path))
    assert row.fields == {"prompt": "1+1", "answer": " 2"}


def test_a_folder_of_data_files(tmp_path, cache, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    with pytest.raises(DataError, match=r"set' is a folder without a dataset: put a \.jsonl"):
        read_rows(str(folder))
    write(folder / "train.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (str(folder), "~/set"):
        rows = list(read_rows(source))
        assert [dict(row.fields) for row in rows] == ROWS
        assert rows[1].location == f"{folder}:train, row 2"
    assert not list(cache.rglob("*.arrow"))
    write(folder / "test.parquet")
    with pytest.raises(
        ValueError, match=f"split '' is not one of .*train.*; write '{folder}:SPLIT"
    ):
        read_rows(str(folder))
    assert len(list(read_rows("~/set:test"))) == len(list(read_rows("~/set/test.parquet"))) == 4
    monkeypatch.chdir(folder)
    assert len(data_files(".")) == len(data_files("~/set:test")) == 2
    assert data_files("") == []


def test_json_lines_in_a_json_file(tmp_path):
    for rows in (ROWS, [{"x": 1, "n": [1]}], [{"x": 1}], [{"messages": [{}]}], [{"prompt": [{}]}]):
        (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert [dict(row.fields) for row in read_rows(str(tmp_path / "a.json"))] == rows


def test_rows_of_a_saved_dataset_name_their_split(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "d")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "e")
    for name in ("d:train", "e"):
        source = f"{tmp_path}/{name}"
        assert next(iter(read_rows(source))).location.startswith(f"{source}, row 1")
    assert f"{tmp_path}/d/train/state.json" in map(str, data_files(f"{tmp_path}/d"))
    message = f"data source '{tmp_path}/e:train': the dataset has no splits; write '{tmp_path}/e'"
    with pytest.raises(ValueError, match=message):
        list(read_rows(f"{tmp_path}/e:train"))


def test_references_have_the_ids_of_their_rows(tmp_path):
    rows = [{"id": "r0", **ROWS[0]}, ROWS[1]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    references = load_references(DataConfig(prompts=str(tmp_path / "a.jsonl")))
    assert [example.id for example, _ in references] == ["r0", f"{tmp_path}/a.jsonl, line 2"]
    assert [example.prompt_text for example, _ in references] == [row["prompt"] for row in ROWS[:2]]


def test_sources_are_visited_in_proportion_to_their_weights(tokenizer, tmp_path):
    sources = []
    for name, count, weight in (("a", 3, 3.0), ("", 4, 1.0)):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:count]))
        sources.append({"path": str(path), "name": name, "weight": weight})
    config = load(DataConfig, {"sources": sources})
    prompts = load_prompts(config, tokenizer)
    taken = prompt_order(config, prompts, 5).take(40)
    assert Counter(prompts[i].source for i in taken) == {"a": 30, str(path): 10}
    assert taken == MixedOrder([3, 4], [3, 1], 5).take(40)
    single = DataConfig(prompts=str(path))
    taken = prompt_order(single, load_prompts(single, tokenizer), 5).take(9)
    own = replace(config, order="collections:deque")
    assert taken == Order(4, 5).take(9)
    assert prompt_order(own, prompts, 5).maxlen == 5


GZIP = b"\x1f\x8b\x08" + b"\x00" * 6 + b"\x03"  # the header of a compressed file


def test_a_json_object_with_one_list(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({"rows": ROWS}))
    assert len(list(read_rows(str(tmp_path / "data.json")))) == len(ROWS)


@pytest.mark.parametrize("characters", [1, 2, 7, 55, 100])
def test_a_json_list_is_read_in_parts_of_any_size(tmp_path, monkeypatch, characters):
    monkeypatch.setattr("gac.data.source.CHUNK", characters)
    for rows in ([], ROWS, [{"prompt": 'é ],[{"', "n": [1.25, {"m": None}]}] * 3):
        for indent in (None, 2):
            (tmp_path / "a.json").write_text(f" {json.dumps(rows, indent=indent)}\n")
            assert [row.fields for row in read_rows(str(tmp_path / "a.json"))] == rows
    (tmp_path / "a.json").write_text("[{},\n{},\n\n{},\nx]")
    with pytest.raises(DataError, match=r"a.json, line 5: not valid JSON"):
        list(read_rows(str(tmp_path / "a.json")))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[{}, 1]", "a.json, row 2: expected an object, found int"),
        ("a.json", "1", "a.json, row 1: expected an object, found int"),
        ("a.json", "\n[{]", "a.json, line 2: not valid JSON"),
        ("a.json", "[{}\n{}]", "a.json, line 2: not valid JSON"),
        ("a.json", "[{},]", "a.json, line 1: not valid JSON"),
        ("a.json", "[{}", "a.json, line 1: not valid JSON"),
        ("a.json", "[{}]1", "a.json: not valid JSON"),
        ("a.json", b"\xff", "a.json: not valid UTF-8"),
        (
            "a.json.gz",
            b"\x1f\x8b\x08\x00",
            "a.json.gz: the compressed file is corrupt or truncated",
        ),
        ("a.csv.xz", b"\xfd7zXZ", "a.csv.xz: the compressed file is corrupt"),
        ("a.json.zst", b"\x28\xb5\x2f\xfd\x00", "a.json.zst: the compressed file is corrupt"),
        ("a.xlsx", b"PK\x03\x04", r"a.xlsx: the format '.xlsx' is not supported: .*as .csv"),
        ("a.csv", "a,b,a\n", "a.csv, line 1: two columns have the same name"),
        ("a.jsonl.gz", GZIP + b"\xff" * 9, "a.jsonl.gz: the compressed file is corrupt"),
        ("a.csv", b"a,b\n1,\xff\n", "a.csv: not valid UTF-8"),
        ("a.csv", 'a,b\n1,"2\n', "a.csv: not valid CSV"),
        ("a.csv", "prompt,answer\n1\n", "a.csv, row 2: the number of fields differs from the 2"),
        ("a.csv", "prompt,answer\n1,2,3\n", "a.csv, row 2: the number of fields differs from"),
        ("a.parquet", "x", "a.parquet: not a valid parquet file"),
    ],
)
def test_invalid_files(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        list(read_rows(str(tmp_path / name)))


def test_errors_of_the_disk_are_not_those_of_a_format(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")  # nothing can be read from its start
    with pytest.raises(OSError, match="Input/output error"):
        list(read_rows(str(tmp_path / "a.jsonl")))


def conversation(tmp_path: Path, *rows: dict) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "0"}
CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, ASSISTANT], "solution": None},
        {"messages": [SYSTEM, USER], "solution": "2"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": "2"},
        {"prompt": [USER], "solution": "2"},
        {"messages": [{**USER, "content": [{"type": "text", "text": "1+1"}]}, ASSISTANT]},
        # fields are not replaced
        {"messages": [USER, {**ASSISTANT, "content": "7"}], "solution": "2"},
        {"prompt": [USER], "completion": "7", "solution": "2"},
        {
            "prompt": [USER],
            "messages": [ASSISTANT, USER, {**ASSISTANT, "content": "2"}],
            "solution": "2",
        },
    ],
)
def test_conversations(tmp_path, chat_tokenizer, row):
    config = DataConfig(prompts=conversation(tmp_path, row), answer_field=None, system="0")
    (prompt,) = load_prompts(config, chat_tokenizer)
    (demo,) = load_demos(config, chat_tokenizer)
    assert prompt.prompt_text == demo.prompt_text == "s:0;u:1+1;a:"
    # the template ends a turn with ";", which this tokenizer lacks
    assert chat_tokenizer.decode(demo.demo) == "2<unk><eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": []}, "field 'prompt': expected a list of messages"),
        ({"messages": 5}, "field 'messages': expected a list of messages, found 5"),
        ({"prompt": [{"role": "user"}]}, "message 1 needs `content` as text"),
        ({"prompt": [USER, {"content": "1"}]}, "message 2 needs a `role` and `content`"),
        ({"prompt": [{**USER, "content": None}]}, "message 1 needs `content` as text"),
        ({"prompt": [{**USER, "content": [{"type": "image"}]}]}, "a part of type 'image'"),
        ({"prompt": [{**USER, "content": ["text"]}]}, "a part of type 'str': use text only"),
        (
            {"prompt": [{**USER, "content": [{"type": "text"}]}]},
            "message 1 needs `content` as text",
        ),
        ({"prompt": [USER], "completion": [USER]}, "one assistant message"),
        ({"prompt": [USER], "completion": [ASSISTANT] * 2}, "one assistant message"),
        ({"prompt": [USER]}, "field 'prompt': is a list of messages: data.template needs a text"),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [CALL]}]},
            "field 'solution': has tool_calls: data.demo_template needs a text",
        ),
    ],
)
def test_invalid_conversations(tmp_path, chat_tokenizer, row, message):
    templates = {"template": "{prompt}", "demo_template": "{demo}"}
    config = DataConfig(prompts=conversation(tmp_path, row), answer_field=None, **templates)
    with pytest.raises(DataError, match=message):
        load_prompts(config, chat_tokenizer)


TOOLS = (
    "{% for t in tools or [] %}{{ t.name }};{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('refused') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a if c.function }}{% endfor %}"
    "=<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_tool_calls_and_a_refused_system_message(tmp_path, chat_tokenizer):
    """A call is a demonstration in the template's own words; arguments may be JSON text, or not."""
    chat_tokenizer.chat_template = TOOLS
    chat_tokenizer.pad_token, chat_tokenizer.eos_token = "<eos>", "<pad>"  # not the end of a turn
    call, result = {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}
    decoded = {"function": {"arguments": {"a": 1}}}
    rows = [
        {
            "messages": [USER, {**call, "content": None}, result, ASSISTANT],
            "tools": [{"name": "0"}],
        },
        {"messages": [SYSTEM, USER, {**call, "content": "3", "tool_calls": [decoded, "?", {}]}]},
        {"messages": [USER, {**call, "tool_calls": [{"function": {"arguments": "{a"}}]}]},
    ]
    config = DataConfig(prompts=conversation(tmp_path, *rows), answer_field=None)
    demos = load_demos(config, chat_tokenizer)
    prompts = [demo.prompt_text.replace("<eos>\n", "") for demo in demos]
    assert prompts == ["0;u:1+1=a:1=t:2=a:", "u:0\n\n1+1=a:", "u:1+1=a:"]
    texts = [chat_tokenizer.decode(demo.demo) for demo in demos]
    assert texts == ["2=<eos>", "31=<eos>", "=<eos>"]
    assert [text for _, text in load_references(config)] == ["2"]  # without a tokenizer
    chat_tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(DataError, match="writes the prompt differently"):
        load_demos(config, chat_tokenizer)


def test_a_conversation_needs_a_chat_template(tmp_path, tokenizer, chat_tokenizer):
    config = DataConfig(prompts=conversation(tmp_path, {"messages": [USER]}), answer_field=None)
    with pytest.raises(DataError, match=r"needs a chat template, .* set model\.tokenizer"):
        load_prompts(config, tokenizer)
    chat_tokenizer.chat_template = "{{ raise_exception('no\n users') }}"
    with pytest.raises(DataError, match=r"the chat template rejects it \(no users\)"):
        load_prompts(config, chat_tokenizer)


def test_several_sources(tmp_path, tokenizer):
    first, second = write(tmp_path / "a.json"), write(tmp_path / "b.csv")
    sources = [{"path": first, "name": "a", "weight": 3}, {"path": second}]
    config = load(DataConfig, {"sources": sources})
    assert Counter(e.source for e in load_prompts(config, tokenizer)) == {"a": 4, second: 4}
    assert Counter(e.source for e in load_demos(config, tokenizer)) == {"a": 4, second: 4}
    assert Counter(e.source for e, _ in load_references(config)) == {"a": 4, second: 4}
    by_answer = load_references(DataConfig(prompts=first, source_field="answer"))
    assert [example.source for example, _ in by_answer] == ["0.", "1.", "2.", "3."]
    bare = conversation(tmp_path, {"prompt": "1+1", "answer": "2"})
    unnamed = load(DataConfig, {"sources": [{"path": first}, {"path": bare}, {"path": second}]})
    assert {demo.source for demo in load_demos(unnamed, tokenizer)} == {first, second}
    assert [x.source for x in load_demos(replace(config, demos=second), tokenizer)] == [""] * 4
    with pytest.raises(
        ValueError, match=rf"^{first}, {second}: no rows left \(dropped: 8 prompt longer"
    ):
        load_prompts(replace(unnamed, max_prompt_tokens=3), tokenizer)
    with pytest.raises(ConfigError, match="either prompts or sources"):
        load(DataConfig, {"sources": sources, "prompts": first})
    marked = conversation(tmp_path, {**ROWS[0], "canary": "x"})
    config = load(DataConfig, {"sources": [{"path": marked}]})
    assert len(load_prompts(config, tokenizer)) == 1
    with pytest.raises(DataError, match="field 'canary'"):
        load_prompts(config, tokenizer, training=True)


@pytest.mark.parametrize("weight", [0.0, float("inf"), float("nan")])
def test_weights_of_sources_are_positive(weight):
    assert (Source("a").weight, Source("a", weight=0.5).weight) == (1.0, 0.5)
    with pytest.raises(ValueError, match=f"weight={weight}: use a number > 0"):
        Source("a", weight=weight)


def test_mixed_order_takes_from_the_source_that_is_furthest_behind():
    """With shares of 1/4, 1/2 and 1/4, this repeats after four rows."""
    sizes, weights = [4, 3, 5], [1, 2, 1]
    order, resumed = (MixedOrder(sizes, weights, 7) for _ in range(2))
    alone, starts = [Order(size, 7 + i) for i, size in enumerate(sizes)], (0, 4, 7)
    expected = [starts[i] + alone[i].take(1)[0] for i in [1, 0, 2, 1] * 5]
    assert order.take(13) == expected[:13]
    resumed.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert resumed.take(7) == order.take(7) == expected[13:]
    with pytest.raises(ValueError, match="this run has 2 sources, but the saved order has 3"):
        MixedOrder(sizes[:2], weights[:2], 7).load_state_dict(order.state_dict())


@pytest.mark.parametrize("source", ["", "name", "owner/name:", ":train", "a/b:c:d:e"])
def test_names_that_the_hub_cannot_have(source):
    with pytest.raises(ValueError, match="no such file or folder, and not a dataset of the Hub"):
        read_rows(source)


@pytest.mark.parametrize(
    "source", ["/no/rows", "./rows", "~/rows", "$NO_FOLDER/rows", "rows.tsv", "a/rows.jsonl.gz"]
)
def test_paths_are_not_looked_up_on_the_hub(source, monkeypatch):
    monkeypatch.delenv("NO_FOLDER", raising=False)
    with pytest.raises(MissingData, match=r"no such file or folder|\$NO_FOLDER is not set"):
        read_rows(source)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no\n such split"), "could not be read from the Hub: no such split"),
        (ConnectionError("x"), "the Hub cannot be reached: give a local file, or check"),
    ],
)
def test_errors_of_the_hub_become_one_line(monkeypatch, error, message):
    datasets = pytest.importorskip("datasets", reason="needs the extra `hub`")

    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
    for keys in ({"prompts": "a/b:c"}, {"demos": "a/b:c"}, {"sources": (Source("a/b:c"),)}):
        with pytest.raises(DataError, match=f"^data.{next(iter(keys))}='a/b:c': {message}"):
            load_demos(DataConfig(**keys), None)
    with pytest.raises(DataError, match=f"^source='a/b:c': {message}"):
        read_rows("a/b:c")


def test_numbers_are_text_and_missing_fields_list_the_others():
    row = SourceRow({"b": 2.5, "a": 0, "c": None}, "rows", 3)
    assert (row.text("a"), row.text("b"), row.text("c", required=False)) == ("0", "2.5", None)
    for field, key, message in (
        ("c", "key", "is null; the row's fields are a, b, c: set key"),
        ("d", None, "is missing; the row's fields are a, b, c"),
    ):
        with pytest.raises(DataError, match=f"^rows, row 3, field '{field}': {message}$"):
            row.get(field, key=key)
    for number in (math.nan, math.inf):
        with pytest.raises(DataError, match=f"is {number}: use a finite number"):
            SourceRow({"a": number}, "rows", 1).text("a")
    with pytest.raises(DataError, match="fields are none$"):
        SourceRow({}, "rows", 1).get("a")


def test_a_conversation_without_a_demonstration(tmp_path, chat_tokenizer):
    """The system prompt precedes all other messages."""
    conversations = ([ASSISTANT], [ASSISTANT, USER], [USER, ASSISTANT])
    rows = [{"messages": messages} for messages in conversations]
    source = conversation(tmp_path, *rows, {"prompt": [USER], "completion": "7"})
    for field in ("solution", None):
        config = DataConfig(prompts=source, answer_field=None, demo_field=field, system="0")
        examples = load_prompts(config, chat_tokenizer)
        texts = [example.prompt_text for example in examples]
        assert texts == ["s:0;a:2;a:", "s:0;a:2;u:1+1;a:", "s:0;u:1+1;a:", "s:0;u:1+1;a:"]
        present = [example.demo is not None for example in examples]
        assert present == [False, False, field is not None, field is not None]
        extra = [(*example.extra, *example.extra.values()) for example in examples]
        assert not any(None in keys_and_values for keys_and_values in extra)


def test_references_are_solutions_or_answers(tmp_path):
    source = conversation(
        tmp_path,
        {"prompt": "p", "answer": 1, "solution": "s"},
        {"messages": [SYSTEM, USER, ASSISTANT], "answer": "3"},
        {"prompt": "q", "answer": "5"},
        {"prompt": "r", "solution": "t"},
    )
    config = DataConfig(prompts=source)
    for field, expected in (
        ("solution", [("p", "1", "s"), ("0\n1+1", "3", "2"), ("r", None, "t")]),
        (None, [("p", "1", "1"), ("0\n1+1", "3", "3"), ("q", "5", "5")]),
    ):
        pairs = load_references(replace(config, demo_field=field))
        assert [(e.prompt_text, e.answer, text) for e, text in pairs] == expected
    assert pairs[0][0].extra == {"prompt": "p", "answer": 1, "solution": "s"}
    config = replace(config, demo_field="none", limit=1)
    for reasons in ("3 not in the sample of limit=1; 1 without 'none'", "nothing"):
        with pytest.raises(ValueError, match=rf"rows\.jsonl: no rows left \(dropped: {reasons}\)"):
            load_references(config)
        conversation(tmp_path)  # an empty file
    with pytest.raises(ValueError, match="prompts is not set"):
        load_references(DataConfig())
