"""What a user can mend: errors whose one line says what is wrong, with which key, and what to do.

`gac` prints such a line and exits with the error's code; every other error is a defect and keeps
its traceback. `--debug` or GAC_DEBUG=1 shows the traceback of these too.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

FAILED, USAGE = 1, 2
EXTRAS = {
    "train": {
        "transformers", "tokenizers", "huggingface_hub", "accelerate", "math_verify", "matplotlib",
        "jinja2", "tqdm",
    },
    "lora": {"peft"},
    "hub": {"datasets"},
    "vllm": {"trl", "requests"},
}  # fmt: skip
"""Extra of pyproject.toml -> the packages that it brings."""


class UserError(Exception):
    """An error whose message is meant for the person who gave the command."""

    exit_code = USAGE


class ConfigError(UserError, ValueError):
    """A configuration or an argument that cannot be used; the message names the key."""


class DataError(UserError, ValueError):
    """A row that cannot be used; the message names the file, the line and the field."""


class MissingData(DataError, FileNotFoundError):
    """A data source that is not there."""


class MissingExtra(UserError, ImportError):
    """A part of the package that was not installed; the message names the extra that brings it."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that is not there, is damaged, or cannot be written."""

    exit_code = FAILED


class NoCheckpoint(CheckpointError):
    """A command asks for a checkpoint that is not there."""

    exit_code = USAGE


class RunError(UserError, RuntimeError):
    """A run that cannot go on; the message says why and what to do."""

    exit_code = FAILED


class BadFolder(RunError):
    """A run directory that cannot be used."""

    exit_code = USAGE


def writable_folder(key: str, path: Path) -> Path:
    """`path`, made if need be; ConfigError naming `key` unless files can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ConfigError(
            f"{key}={str(path)!r} cannot be written ({error.strerror}): choose another folder"
        ) from error


@contextlib.contextmanager
def refusals_are(error: type[UserError], key: str = "") -> Iterator[None]:
    """Turn the ValueError with which a part refuses its arguments into `error`, `key: ` before it.

    For set-up alone: what raises ValueError later is a defect.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as refusal:
        raise error(f"{key}: {refusal}" if key else str(refusal)) from refusal


@contextlib.contextmanager
def extras_named(purpose: str) -> Iterator[None]:
    """Turn the import of a package that an extra brings, and that is not there, into one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, brings in EXTRAS.items() if package in brings), None)
        if extra is None:
            raise
        raise MissingExtra(
            f"{purpose} needs the extra {extra} ({package}): pip install 'gac[{extra}]'",
            name=error.name,
        ) from error


def import_extra(module: str, purpose: str) -> ModuleType:
    """The module, or MissingExtra."""
    with extras_named(purpose):
        return import_module(module)


def verdict(error: BaseException) -> tuple[str, int] | None:
    """The line and the exit code for an error that its user can mend; None for a defect."""
    if isinstance(error, UserError):
        return _one_line(str(error)), error.exit_code
    if isinstance(error, OSError):
        if error.filename is not None:  # of a file that the user named, or of one below it
            return f"{error.filename}: {_one_line(error.strerror or str(error))}", USAGE
        if error.errno == errno.ENOSPC:
            return "no space is left on the disk: make room, then give the command again", FAILED
        if isinstance(error, FileNotFoundError | FileExistsError):  # raised here, in words
            return _one_line(str(error)), USAGE
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())
