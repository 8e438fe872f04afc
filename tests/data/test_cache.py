"""Large data is tokenized once per node: later loads find it in a cache, keyed by all inputs."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from gac.data import DataConfig, DataError, Example, load_demos, load_prompts
from gac.data import examples as module
from gac.data.stored import store
from gac.demo.task import make_tokenizer
from tests import ranks as processes

ROWS = [{"id": f"{i}", "prompt": f"{i}+1", "answer": "2", "solution": f"{i}"} for i in range(40)]


def tokenizer(template: str = "{{ messages[0].content }}") -> Any:
    made = make_tokenizer()
    made.chat_template = template
    return made


def held(path: Path) -> bool:
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def load(
    home: Path, path: Path, *, load: Any = load_prompts, tokens: Any = None, **options: Any
) -> tuple[list[Example], int]:
    """The examples of a file, and the number of rows that were tokenized for them."""
    counts, own = [], module._encode_chunk

    def encode(config: Any, made: Any, rows: Any, **answers: Any) -> Any:
        counts.append(len(rows))
        assert sum(map(held, home.glob("*/*.lock"))) == home.is_dir()
        return own(config, made, rows, **answers)

    training = {"training": options.pop("training")} if "training" in options else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HOME", home)
        patch.setattr("gac.data.stored.CACHE_FROM", 1)
        patch.setattr(module, "_encode_chunk", encode)
        config = DataConfig(prompts=str(path), **options)
        return [*load(config, tokens or tokenizer(), **training)], sum(counts)


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_process_of_a_node_tokenizes(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    results = processes.run(load, tmp_path / "home", path, ranks=2)
    assert sorted(count for _, count in results) == [0, len(ROWS)]
    assert results[0][0] == results[1][0]
    assert len(results[0][0]) == len(ROWS)
    assert load(tmp_path / "home", path) == (results[0][0], 0)  # the next run


def test_a_changed_input_is_tokenized_again(tmp_path: Path, monkeypatch: Any) -> None:
    path = write(tmp_path / "rows.jsonl")
    assert load(tmp_path, path)[1] == load(tmp_path / "other", path)[1] == len(ROWS)
    for file in (path, write(tmp_path / "same.jsonl")):  # its rows may be named after it
        monkeypatch.setenv("FILE", str(file))
        assert load(tmp_path, Path("$FILE"))[1] == len(ROWS), file
    changes: list[dict[str, Any]] = [
        {"template": "{prompt}="},
        {"tokens": tokenizer("{{ messages[0].content }}+")},
        {"load": load_demos},
        {"training": True},
    ]
    for change in changes:
        assert [load(tmp_path, path, **change)[1] for _ in "12"] == [len(ROWS), 0], change
    assert load(tmp_path, path, order="a:b")[1] == 0  # not an input
    for version, other in (
        ("transformers.__version__", "0"),
        ("gac.data.stored.__file__", __file__),
    ):
        monkeypatch.setattr(version, other)
        assert [load(tmp_path, path)[1] for _ in "12"] == [len(ROWS), 0], version
    loaded, count = load(tmp_path, write(path, ROWS[:3]))
    assert (len(loaded), count) == (3, 3)
    assert len(load(tmp_path, write(path))[0]) == len(ROWS)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:99] + b"?" + data[100:]]
)
def test_a_damaged_cache_is_written_again(tmp_path: Path, caplog: Any, damage: Any) -> None:
    path = write(tmp_path / "rows.jsonl")
    expected, _ = load(tmp_path, path)
    (cache,) = tmp_path.rglob("*.examples")
    cache.write_bytes(damage(cache.read_bytes()))
    assert load(tmp_path, path) == (expected, len(ROWS))
    assert f"{cache}: this cache of tokenized rows is damaged" in caplog.text
    assert load(tmp_path, path) == (expected, 0)


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_can_write_is_not_unpickled(
    tmp_path: Path, monkeypatch: Any, mode: int
) -> None:
    path = tmp_path / "gac" / "x.examples"
    example = Example("", (1,), "", "", None, {})
    assert len(store(path, [example], {})) == len(store(path, [], {})) == 1
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for others, count in ((mode, 0), (0o755, 1)):
        path.parent.chmod(others)
        assert len(store(path, [], {})) == count
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)  # as if the folder were another's
    assert len(store(path, [], {})) == 0


def test_what_cannot_be_cached_is_tokenized(tmp_path: Path, caplog: Any) -> None:
    """A folder that is not writable, and rows with an error, which leave no partial file."""
    path = write(tmp_path / "rows.jsonl")
    assert [load(path, path)[1] for _ in "12"] == [len(ROWS)] * 2
    assert "tokenized rows are not cached" in caplog.text
    with pytest.raises(DataError, match="line 41, field 'prompt'"):
        load(tmp_path, write(path, [*ROWS, {"prompt": 1 == 1}]))
    assert [p.suffix for p in tmp_path.glob("gac-*/*")] == [".lock"]
