"""Where rows come from: JSON lines (plain or gzipped), saved Hugging Face datasets, the hub."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gac.errors import DataError, MissingData, import_extra

JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")


@dataclass(frozen=True)
class SourceRow:
    """One row and where it stands, so that every later complaint can point at it."""

    fields: Mapping[str, Any]
    """The row as read."""
    source: str
    """The file, or the data set's name and split."""
    number: int
    """Line of the file, or row of the data set, counted from 1."""

    @property
    def place(self) -> str:
        """`file.jsonl, line 3`."""
        return f"{self.source}, line {self.number}"

    def fail(self, field: str, problem: str) -> NoReturn:
        """Raise `DataError` for `field` of this row."""
        raise DataError(f"{self.place}, field {field!r}: {problem}")

    def get(self, field: str, *, required: bool = True, key: str | None = None) -> Any:
        """The field's value; None when it is absent or null and not `required`.

        key: of the configuration, that chose the field, for the error.
        """
        value = self.fields.get(field)
        if value is None and required:
            state = "is null" if field in self.fields else "is missing"
            had = ", ".join(sorted(self.fields)) or "no field"
            self.fail(field, f"{state}; the row has {had}{f': set {key}' if key else ''}")
        return value

    def text(self, field: str, *, required: bool = True, key: str | None = None) -> str | None:
        """The field as text that is not blank (numbers are written out); see `get`."""
        value = self.get(field, required=required, key=key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            self.fail(field, f"expected text, found {type(value).__name__} {value!r:.60}")
        if not value.strip():
            self.fail(field, "is empty")
        return value


def read_rows(source: str) -> Iterator[SourceRow]:
    """Yield the rows of `source`, lazily and in order.

    `source` is a JSON-lines file (`.jsonl`, `.jsonl.gz`), the folder of a saved Hugging Face data
    set (`folder`, or `folder:split` where it holds several splits), or a data set of the hub
    (`owner/name:split` or `owner/name:configuration:split`). `~` and `$NAME` are expanded.

    Raises:
        MissingData: a path that does not exist.
        DataError: a line that is not a JSON object.
        ValueError: a hub name without its split.
        MissingExtra: a Hugging Face data set without the `datasets` package.
    """
    source = os.path.expandvars(source)
    path = Path(source).expanduser()
    if path.is_file():
        return _read_lines(path)
    folder, _, split = source.partition(":")
    if Path(folder).expanduser().is_dir():
        return _read_saved(Path(folder).expanduser(), split)
    if source.endswith(JSON_LINES) or source.startswith(("/", ".", "~", "$")):
        raise MissingData(f"data source {source!r}: there is no such file or folder")
    return _read_hub(source)


def _read_lines(path: Path) -> Iterator[SourceRow]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as lines:
        for number, line in enumerate(_undamaged(lines, path), start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                raise DataError(f"{place}: the line is empty; delete it")
            try:
                fields = json.loads(line.decode("utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise DataError(f"{place}: not valid JSON in UTF-8 ({error})") from error
            if not isinstance(fields, dict):
                raise DataError(f"{place}: expected an object, found {type(fields).__name__}")
            yield SourceRow(fields, str(path), number)


def _undamaged(lines: Iterable[bytes], path: Path) -> Iterator[bytes]:
    try:
        yield from lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the compressed file is damaged or cut short ({error})") from error


def _datasets() -> Any:
    return import_extra("datasets", "a Hugging Face data set (unlike a .jsonl file)")


def _read_saved(folder: Path, split: str) -> Iterator[SourceRow]:
    try:
        saved = _datasets().load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise DataError(
            f"data source {str(folder)!r} is a folder without a saved data set: name a .jsonl file "
            "in it, or what datasets' save_to_disk wrote"
        ) from error
    if isinstance(saved, dict):
        if split not in saved:
            raise ValueError(
                f"data source {str(folder)!r}: split {split!r} is not one of {', '.join(saved)}; "
                f"write '{folder}:SPLIT'"
            )
        saved = saved[split]
    return _enumerate(saved, f"{folder}:{split}" if split else str(folder))


def _read_hub(source: str) -> Iterator[SourceRow]:
    name, *rest = source.split(":")
    if len(rest) not in (1, 2) or not all([name, *rest]):
        raise ValueError(
            f"data source {source!r}: no such file, and not 'name:split' or "
            "'name:configuration:split' of the Hugging Face hub"
        )
    *configuration, split = rest
    datasets = _datasets()
    try:
        table = datasets.load_dataset(name, *configuration, split=split)
    except (OSError, ValueError) as error:  # no network, no such data set, no such split
        problem = " ".join(str(error).split())[:300]
        raise DataError(f"data source {source!r} cannot be read from the hub: {problem}") from error
    return _enumerate(table, source)


def _enumerate(table: Any, source: str) -> Iterator[SourceRow]:
    for number, fields in enumerate(table, start=1):
        yield SourceRow(fields, source, number)
