"""Reads rows from JSON, CSV, parquet and arrow files, and from Hugging Face datasets."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from gac.errors import DataError, MissingData, import_extra
from gac.fields import expanded

TABLES = {".parquet": "parquet", ".arrow": "arrow"}  # suffix -> builder of `datasets`
TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (*TEXTS, *COMPRESSED, *TABLES)
# owner/name[:configuration][:split], or name[:configuration]:split
HUB = re.compile(r"\w[\w.-]*(/[\w.-]+(:[^:]+){0,2}|(:[^:]+){1,2})")
CHATS = {"messages", "prompt"}  # fields whose value may be a list of messages
CHUNK = 1 << 16  # characters of a JSON list that are read at once
FORMATS = "a .jsonl, .json, .csv, .parquet or .arrow file"


@dataclass(frozen=True)
class SourceRow:
    """One row and its location, for error messages."""

    fields: Mapping[str, Any]
    """The row as read."""
    source: str
    """The file, or the dataset's name and split."""
    number: int | None = None
    """Its line or row, counted from 1; the header of a CSV file is row 1. None: `source` says it.
    """
    unit: str = "row"
    """What `number` counts: "line" in a file with one row per line."""

    @property
    def location(self) -> str:
        """Where the row is, e.g. `file.jsonl, line 3` or `file.csv, row 3`."""
        return self.source if self.number is None else f"{self.source}, {self.unit} {self.number}"

    def fail(self, field: str, problem: str) -> NoReturn:
        """Raise `DataError` for `field` of this row."""
        raise DataError(self.problem(field, problem))

    def problem(self, field: str, text: str) -> str:
        """The message of an error: where `field` is, and the problem `text`."""
        separator = ":" if self.number is None else ","
        return f"{self.location}{separator} field {field!r}: {text}"

    def get(self, field: str, *, required: bool = True, key: str | None = None) -> Any:
        """The field's value; if not `required`, None for an absent or null field.

        key: the configuration key that selected the field, for the error message.
        """
        value = self.fields.get(field)
        if value is None and required:
            state = "is null" if field in self.fields else "is missing"
            present = ", ".join(sorted(self.fields)) or "none"
            hint = f": set {key}" if key else ""
            self.fail(field, f"{state}; the row's fields are {present}{hint}")
        return value

    def text(self, field: str, *, required: bool = True, key: str | None = None) -> str | None:
        """The field as non-blank text (numbers are converted); see `get`."""
        value = self.get(field, required=required, key=key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                self.fail(field, f"is {value}: use a finite number, or null")
            return str(_integer(value))
        if not isinstance(value, str):
            self.fail(field, f"expected text, found {type(value).__name__} {value!r:.60}")
        if not value.strip():
            self.fail(field, "is empty")
        if re.search("[\ud800-\udfff]", value):
            self.fail(field, "has half of a surrogate pair, which is no character: remove it")
        return value


def _integer(value: float) -> float:
    """A number that is an integer as an int: 5.0 is 5, whatever a column's type is."""
    exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if exact else value


def table_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A table's row without what the table's schema adds to it.

    A nested column has the fields of all rows, so each row gets the others' as null; integers in a
    column of floats become floats, and missing numbers nan. Nested nulls and all nans are removed,
    and floats that are integers become integers.
    """
    return {name: _without_padding(value) for name, value in fields.items()}


def _without_padding(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = {name: _without_padding(item) for name, item in value.items()}
        return {name: item for name, item in items.items() if item is not None}
    if isinstance(value, list):
        return [_without_padding(item) for item in value]
    if isinstance(value, float):
        return None if math.isnan(value) else _integer(value)
    return value


def read_rows(source: str, key: str = "source") -> Iterator[SourceRow]:
    """Yield the rows of `source`, lazily and in order.

    `source` is a file, a folder or a dataset on the Hub. A file ends in `.parquet` or `.arrow`, or
    in `.jsonl`, `.json`, `.csv` or `.tsv`, optionally followed by `.gz`, `.bz2`, `.xz` or `.zst`
    (which needs pyarrow). A folder contains a saved Hugging Face dataset or data files: `folder`,
    or `folder:split` if it has several splits. A dataset on the Hub is `owner/name`,
    `owner/name:split` or `owner/name:configuration:split`. `~` and `$NAME` are expanded.

    key: the configuration key with `source`, for an error message.

    Raises:
        MissingData: a path that does not exist.
        DataError: a row that cannot be parsed.
        ValueError: a dataset with several splits, but none is named.
        MissingExtra: a Hugging Face dataset, but `datasets` is not installed.
    """
    source = expanded(source)
    path = Path(source)
    if path.is_file():
        return _read_file(path)
    folder, _, split = source.partition(":")
    if folder and Path(folder).is_dir():
        return _read_saved(Path(folder), split)
    if problem := why_missing(source):
        raise MissingData(f"data source {source!r}: {problem}")
    return _enumerate(_hub(source, key), source)


def data_files(source: str, key: str = "source") -> list[Path]:
    """The files that contain the rows of `source`, and nothing else; none if it is missing.

    key: the configuration key with `source`, for the error message.
    """
    source = expanded(source)
    path, folder = (Path(x) for x in (source, source.partition(":")[0]))
    if path.is_file() or (source and folder.is_dir()):
        return sorted(file for file in (path, *folder.rglob("*")) if file.is_file())
    return [
        Path(file["filename"])
        for file in (() if why_missing(source) else _hub(source, key).cache_files)
    ]


def why_missing(source: str) -> str:
    """Why there is no data under a name that is no path here; empty if it may be on the Hub."""
    unset = re.findall(r"\$\w+", expanded(source))
    if unset:
        return f"{unset[0]} is not set: export it, or give the path"
    if HUB.fullmatch(source) and not source.endswith(SUFFIXES):
        return ""
    return "no such file or folder, and not a dataset of the Hub, owner/name:split"


def _read_file(path: Path) -> Iterator[SourceRow]:
    """Yield the file's rows; raise DataError if it cannot be decompressed or decoded."""
    name = Path(path.name)
    suffix = Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix
    try:
        if suffix in TABLES:
            yield from _read_table(path, TABLES[suffix])
        elif suffix in (".csv", ".tsv"):
            yield from _read_csv(path, "," if suffix == ".csv" else "\t")
        elif suffix == ".json":
            yield from _read_json(path)
        elif suffix in TEXTS:
            yield from _read_lines(path)
        else:
            raise DataError(
                f"{path}: the format {suffix!r} is not supported: use {FORMATS} (save a "
                "spreadsheet as .csv, unpack an archive)"
            )
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 ({error}): save it as UTF-8") from error
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{path}: the compressed file is corrupt or truncated ({error})") from error


def _open(path: Path) -> IO[bytes]:
    """Open a file; its first bytes, not its name, tell whether it is compressed."""
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"\x28\xb5\x2f\xfd":
        pyarrow = import_extra("pyarrow", f"reading {path.name}")
        return io.BufferedReader(pyarrow.input_stream(path, "zstd"))
    openers: dict[bytes, Callable[..., Any]] = {
        b"\x1f\x8b": gzip.open,
        b"BZh": bz2.open,
        b"\xfd7zX": lzma.open,
    }
    opener = next((openers[magic] for magic in openers if start.startswith(magic)), open)
    return opener(path, "rb")


def _text(path: Path) -> IO[str]:
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="")


def _read_table(path: Path, kind: str) -> Iterator[SourceRow]:
    datasets = import_extra("datasets", f"reading {path.name}")
    try:
        table = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        yield from _enumerate(table, str(path))
    except (OSError, ValueError) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: not a valid {kind} file ({problem})") from error


def _read_csv(path: Path, separator: str) -> Iterator[SourceRow]:
    """Read a CSV file: every field is text, and an empty field is null.

    If the header has blanks after its separators, they are dropped in all lines.
    """
    csv.field_size_limit(sys.maxsize)  # a cell may be a long text
    with _text(path) as lines:
        header = lines.readline()
        options: Any = {"delimiter": separator, "skipinitialspace": f"{separator} " in header}
        names = [name.strip() for name in next(csv.reader([header], **options), [])]
        rows = csv.DictReader(lines, names, strict=True, **options)
        if len(set(names)) < len(names):
            raise DataError(f"{path}, line 1: two columns have the same name: {', '.join(names)}")
        try:
            for number, row in enumerate(rows, start=2):  # the header is line 1
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, row {number}: the number of fields differs from the {len(names)} "
                        "in the header: quote fields that contain separators"
                    )
                fields = {name: value or None for name, value in row.items()}
                yield SourceRow(fields, str(path), number)
        except csv.Error as error:
            raise DataError(f"{path}: not valid CSV ({error})") from error


def _read_json(path: Path) -> Iterator[SourceRow]:
    """Read a list of objects, an object with such a list as its only value, or JSON lines."""
    with _text(path) as file:
        first = next((c for c in iter(lambda: file.read(1), "") if not c.isspace()), "")
    rows: Any = _items(path)
    if first != "[":
        try:
            with _text(path) as file:
                rows = [json.load(file)]
        except json.JSONDecodeError as error:
            if error.msg == "Extra data":  # a second line
                yield from _read_lines(path)
                return
            raise DataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
        values = [*rows[0].values()] if isinstance(rows[0], dict) else []
        if len(values) == 1 and isinstance(values[0], list) and not CHATS & rows[0].keys():
            rows = values[0]
    for number, fields in enumerate(rows, start=1):
        if not isinstance(fields, dict):
            raise DataError(
                f"{path}, row {number}: expected an object, found {type(fields).__name__}"
            )
        yield SourceRow(fields, str(path), number)


def _items(path: Path) -> Iterator[Any]:
    """Yield the items of the file's JSON list without keeping the list in memory."""
    decode = json.JSONDecoder().raw_decode
    space: Any = re.compile(r"[ \t\n\r]*").match  # of any text
    text, at, line, mark = "", 0, 1, "["
    with _text(path) as file:
        while mark != "]":
            try:
                start = space(text, at).end()
                if text[start] != mark:
                    raise json.JSONDecodeError(f"expected {mark!r} or ']'", text, start)
                start = space(text, start + 1).end()
                if mark == "[" and text[start] == "]":
                    return
                item, end = decode(text, start)
                end = space(text, end).end()
                mark = "]" if text[end] == "]" else ","
            except (IndexError, json.JSONDecodeError) as error:  # wrong, or not read to the end
                chunk = file.read(max(CHUNK, len(text) - at))
                if not chunk:
                    line += text.count("\n", 0, getattr(error, "pos", len(text)))
                    problem = getattr(error, "msg", "the list has no end")
                    raise DataError(f"{path}, line {line}: not valid JSON ({problem})") from error
                line += text.count("\n", 0, at)
                text, at = text[at:] + chunk, 0
            else:
                yield item
                at = end
        if (text[at + 1 :] + file.read()).strip():
            raise DataError(f"{path}: not valid JSON (text after the list)")


def _read_lines(path: Path) -> Iterator[SourceRow]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            location = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8-sig"))
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                raise DataError(f"{location}: not valid UTF-8 JSON ({error})") from error
            if not isinstance(fields, dict):
                raise DataError(f"{location}: expected an object, found {type(fields).__name__}")
            yield SourceRow(fields, str(path), number, "line")


def _datasets() -> Any:
    return import_extra("datasets", "reading a Hugging Face dataset")


def _read_saved(folder: Path, split: str) -> Iterator[SourceRow]:
    try:
        saved = _datasets().load_from_disk(str(folder))
    except FileNotFoundError:  # not written by `save_to_disk`
        saved = _read_folder(folder)
    if isinstance(saved, dict):
        split = split or (next(iter(saved)) if len(saved) == 1 else "")
        if split not in saved:
            raise ValueError(
                f"data source {str(folder)!r}: split {split!r} is not one of {', '.join(saved)}; "
                f"write '{folder}:SPLIT'"
            )
        saved = saved[split]
    elif split:
        raise ValueError(
            f"data source '{folder}:{split}': the dataset has no splits; write {str(folder)!r}"
        )
    return _enumerate(saved, f"{folder}:{split}" if split else str(folder))


def _read_folder(folder: Path) -> Any:
    """The splits of a folder with data files, as `datasets` finds them."""
    try:
        return _datasets().load_dataset(str(folder), streaming=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"data source {str(folder)!r} is a folder without a dataset: put {FORMATS} in it, or "
            "give a folder written by datasets' save_to_disk"
        ) from error


def _hub(source: str, key: str) -> Any:
    name, *rest = source.split(":")
    *configuration, split = rest or ["train"]
    datasets = _datasets()
    # without a network, retries take most of a minute
    logging.getLogger(__name__).info("%s=%r: reading the dataset on the Hub", key, source)
    try:
        return datasets.load_dataset(name, *configuration, split=split)
    except (OSError, ValueError) as error:  # no network, no such dataset, no such split
        problem = (
            "the Hub cannot be reached: give a local file, or check the network"
            if isinstance(error, ConnectionError)
            else f"could not be read from the Hub: {' '.join(str(error).split())[:300]}"
        )
        raise DataError(f"{key}={source!r}: {problem}") from error


def _enumerate(table: Any, source: str) -> Iterator[SourceRow]:
    for number, fields in enumerate(table, start=1):
        yield SourceRow(table_row(fields), source, number)
