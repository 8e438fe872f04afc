"""User-facing errors: one line that says what is wrong, which key is at fault and what to do.

`gac` prints that line and exits with the error's code. Any other error is a bug and keeps its
traceback; `--debug` or GAC_DEBUG=1 shows the traceback of user-facing errors as well.
"""

from __future__ import annotations

import contextlib
import errno
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import SupportsFloat

FAILED, USAGE = 1, 2
EXTRAS = {
    "train": {
        "numpy",
        "yaml",
        "transformers",
        "tokenizers",
        "huggingface_hub",
        "accelerate",
        "math_verify",
        "matplotlib",
        "jinja2",
        "psutil",
        "tqdm",
    },
    "lora": {"peft"},
    "hub": {"datasets", "pyarrow"},
    "gguf": {"gguf"},
    "vllm": {"trl", "requests"},
}
"""Extra in pyproject.toml -> the packages that it installs."""


class UserError(Exception):
    """Base class of errors whose message is written for the user."""

    exit_code = USAGE


class ConfigError(UserError, ValueError):
    """An invalid configuration or argument; the message names the key."""


class DataError(UserError, ValueError):
    """An invalid data row; the message names the file, the line or row, and the field."""


class MissingData(DataError, FileNotFoundError):
    """A data source that does not exist."""


class MissingExtra(UserError, ImportError):
    """A missing optional dependency; the message names the extra that installs it."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that is missing, corrupt or not writable."""

    exit_code = FAILED


class CheckpointNotFound(CheckpointError):
    """The requested checkpoint does not exist."""

    exit_code = USAGE


class RunError(UserError, RuntimeError):
    """A run that cannot continue; the message says why and what to do."""

    exit_code = FAILED


class RunDirectoryError(RunError):
    """An unusable run directory."""

    exit_code = USAGE


def require(ok: bool, name: str, value: object, use: str) -> None:
    """Raise ValueError "name=value: use ..." unless `ok`."""
    if not ok:
        raise ValueError(f"{name}={value!r}: use {use}")


def require_counts(options: object, *names: str) -> None:
    """Raise ConfigError unless each named option of a command is None or at least 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value!r}: use a number >= 1")


def is_real(value: object) -> bool:
    """Whether `value` is a finite Python number; bool does not count."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max  # unlike isfinite, for integers of any size
    )


def is_count(value: object, minimum: int = 0) -> bool:
    """Whether `value` is an integer >= `minimum`; bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def finite(name: str, value: SupportsFloat) -> float:
    """Convert a Python number or 0-d array to a float; raise ValueError if it is not finite."""
    number = float(value) if hasattr(value, "__float__") else math.nan
    require(math.isfinite(number), name, value, "a finite number")
    return number


def numbers(name: str, values: Sequence[SupportsFloat], count: int) -> list[float]:
    """Convert `values` to floats; raise ValueError unless they are `count` finite numbers."""
    require(len(values) == count, name, values, f"{count} numbers, or None")
    return [finite(name, value) for value in values]


def writable_folder(key: str, path: Path) -> Path:
    """Create `path` if needed and return it. Raises ConfigError for `key` if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ConfigError(
            f"{key}={str(path)!r} cannot be written ({error.strerror}): choose another folder"
        ) from error


@contextlib.contextmanager
def value_errors_as(error: type[UserError], key: str = "") -> Iterator[None]:
    """Re-raise a ValueError from argument checks as `error`, prefixed with `key: `.

    For setup only: a ValueError raised later is a bug.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as cause:
        raise error(f"{key}: {cause}" if key else str(cause)) from cause


@contextlib.contextmanager
def explain_missing_extra(purpose: str) -> Iterator[None]:
    """Turn a failed import of an optional dependency into a MissingExtra that names its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        raise MissingExtra(
            f"{purpose} needs the extra {extra} ({package}): pip install 'gac-kernels[{extra}]'",
            name=error.name,
        ) from error


def import_extra(module: str, purpose: str) -> ModuleType:
    """Import `module`, or raise MissingExtra."""
    with explain_missing_extra(purpose):
        return import_module(module)


def user_message(error: BaseException) -> tuple[str, int] | None:
    """The message and exit code of a user-facing error; None for a bug."""
    if isinstance(error, UserError):
        return _one_line(str(error)), error.exit_code
    if isinstance(error, OSError):
        if error.filename is not None:  # a path from the user, or one inside it
            return f"{error.filename}: {_one_line(error.strerror or str(error))}", USAGE
        if error.errno == errno.ENOSPC:
            return "no space left on device: free some space and rerun the command", FAILED
        # raised by gac itself, with its own message
        if isinstance(error, FileNotFoundError | FileExistsError):
            return _one_line(str(error)), USAGE
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())
