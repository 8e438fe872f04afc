"""Reads rows from JSON lines (plain or gzipped), saved Hugging Face datasets, or the Hub."""

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
    """One row and its location, for error messages."""

    fields: Mapping[str, Any]
    """The row as read."""
    source: str
    """The file, or the dataset's name and split."""
    number: int
    """Line of the file, or row of the dataset, counted from 1."""

    @property
    def location(self) -> str:
        """E.g. `file.jsonl, line 3`."""
        return f"{self.source}, line {self.number}"

    def fail(self, field: str, problem: str) -> NoReturn:
        """Raise `DataError` for `field` of this row."""
        raise DataError(f"{self.location}, field {field!r}: {problem}")

    def get(self, field: str, *, required: bool = True, key: str | None = None) -> Any:
        """The field's value; None when it is absent or null and not `required`.

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
            return str(value)
        if not isinstance(value, str):
            self.fail(field, f"expected text, found {type(value).__name__} {value!r:.60}")
        if not value.strip():
            self.fail(field, "is empty")
        return value


def read_rows(source: str) -> Iterator[SourceRow]:
    """Yield the rows of `source`, lazily and in order.

    `source` is a JSON-lines file (`.jsonl`, `.jsonl.gz`), the folder of a saved Hugging Face
    dataset (`folder`, or `folder:split` if it has several splits), or a dataset on the Hub
    (`owner/name:split` or `owner/name:configuration:split`). `~` and `$NAME` are expanded.

    Raises:
        MissingData: a path that does not exist.
        DataError: a line that is not a JSON object.
        ValueError: a Hub name without a split.
        MissingExtra: a Hugging Face dataset, but `datasets` is not installed.
    """
    source = os.path.expandvars(source)
    path = Path(source).expanduser()
    if path.is_file():
        return _read_lines(path)
    folder, _, split = source.partition(":")
    if Path(folder).expanduser().is_dir():
        return _read_saved(Path(folder).expanduser(), split)
    if source.endswith(JSON_LINES) or source.startswith(("/", ".", "~", "$")):
        raise MissingData(f"data source {source!r}: no such file or folder")
    return _read_hub(source)


def _read_lines(path: Path) -> Iterator[SourceRow]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as lines:
        for number, line in enumerate(_undamaged(lines, path), start=1):
            location = f"{path}, line {number}"
            if not line.strip():
                raise DataError(f"{location}: the line is empty; delete it")
            try:
                fields = json.loads(line.decode("utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise DataError(f"{location}: not valid UTF-8 JSON ({error})") from error
            if not isinstance(fields, dict):
                raise DataError(f"{location}: expected an object, found {type(fields).__name__}")
            yield SourceRow(fields, str(path), number)


def _undamaged(lines: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Yield `lines`; raise DataError if the compressed file is corrupt."""
    try:
        yield from lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the compressed file is corrupt or truncated ({error})") from error


def _datasets() -> Any:
    return import_extra("datasets", "reading a Hugging Face dataset (unlike a .jsonl file)")


def _read_saved(folder: Path, split: str) -> Iterator[SourceRow]:
    try:
        saved = _datasets().load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise DataError(
            f"data source {str(folder)!r} is a folder without a saved dataset: give a .jsonl file "
            "in it, or a folder written by datasets' save_to_disk"
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
            f"data source {source!r}: no such file, and not a Hub dataset 'name:split' or "
            "'name:configuration:split'"
        )
    *configuration, split = rest
    datasets = _datasets()
    try:
        table = datasets.load_dataset(name, *configuration, split=split)
    except (OSError, ValueError) as error:  # no network, no such dataset, no such split
        problem = " ".join(str(error).split())[:300]
        message = f"data source {source!r} could not be read from the Hub: {problem}"
        raise DataError(message) from error
    return _enumerate(table, source)


def _enumerate(table: Any, source: str) -> Iterator[SourceRow]:
    for number, fields in enumerate(table, start=1):
        yield SourceRow(fields, source, number)
