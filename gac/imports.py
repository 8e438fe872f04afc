"""Imports the user's own classes and functions, named `package.module:name` in a configuration."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from gac.errors import ConfigError, RunError, UserError

OWN = f"{Path(__file__).parent}/"  # frames of this package are not the user's
USER_ERRORS = Exception, SystemExit, GeneratorExit  # what user code may raise, and a run survives
_names: dict[int, tuple[object, str]] = {}  # an imported object by its id, and its name


def load_object(name: str, where: str) -> Callable[..., Any]:
    """Import the class or function named `package.module:name`.

    `path/file.py:name` loads a file. The path is relative to the current folder or to a folder in
    `sys.path`, such as that of the configuration file.

    Args:
        name: what to import.
        where: the configuration key, for error messages.

    Raises:
        ConfigError: no such module or file, no such name in it, or not callable.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        raise ConfigError(f"{where}={name!r}: use package.module:name or path/file.py:name")
    is_file = module_name.endswith(".py") or "/" in module_name
    module = _load_file(module_name, where) if is_file else _import_module(name, where)
    try:
        value = getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{where} {name!r}: {module_name} has no {attribute!r}") from error
    if not callable(value):
        raise ConfigError(f"{where} {name!r}: {attribute} is not callable")
    _names[id(value)] = value, name  # by id, because it may not be hashable
    return value


def find_user_code(config: Path | None) -> None:
    """Let modules be imported from the current folder and that of the configuration file."""
    folders = [Path.cwd(), *([] if config is None else [config.parent.resolve()])]
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]


def import_name(value: Any) -> str | None:
    """The name with which `load_object` imports a class or function; None if there is none."""
    name = f"{value.__module__}:{value.__qualname__}"
    own = None if "<" in name or name.startswith("__main__:") else name
    return _names.get(id(value), (value, own))[1]


def _import_module(name: str, where: str) -> ModuleType:
    """Import the module of `package.module:name`."""
    module, _, attribute = name.rpartition(":")
    try:
        with user_code(f"{where} {name!r}", ConfigError):
            return importlib.import_module(module)
    except ConfigError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if not f"{module}.".startswith(f"{missing}."):
            raise  # the module exists, but its own code or one of its imports fails
        raise ConfigError(
            f"{where} {name!r}: no module {missing!r}; give its file as `path/file.py:"
            f"{attribute}`, or add its folder to PYTHONPATH"
        ) from cause


def _load_file(path: str, where: str) -> ModuleType:
    """Import a file, once."""
    folders = [Path(), *map(Path, reversed(sys.path))]  # the configuration's folder comes last
    file = next((file for folder in folders if (file := folder / path).is_file()), None)
    if file is None:
        raise ConfigError(
            f"{where}: no file {path!r} in this folder or next to the configuration file"
        )
    module_name = f"gac_user_{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {str(file)!r} is not a Python file")
    sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
    try:
        with user_code(f"{where} {path!r}", ConfigError):
            spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[module_name]
        raise
    return module


def explained(error: BaseException) -> Exception:
    """The failure of user code, one of `USER_ERRORS`, as an exception."""
    if isinstance(error, Exception):
        return error
    text = f"it raised {error!r}"
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error.code!r})"
    return RuntimeError(text).with_traceback(error.__traceback__)


@contextlib.contextmanager
def user_code(where: str, kind: type[UserError] = RunError) -> Iterator[None]:
    """Turn an exception of the user's own code into a UserError with its file and line."""
    try:
        yield
    except UserError:  # of this package, which the code called
        raise
    except USER_ERRORS as raised:
        error = explained(raised)
        problem = f"{type(error).__name__}: {error}{location(error)}"
        raise kind(f"{where}: {problem}") from error


def location(error: BaseException) -> str:
    """` (file, line N)` of the last line of user code in the traceback, or an empty string."""
    frames = traceback.extract_tb(error.__traceback__)
    prefixes = (sys.prefix, sys.base_prefix, OWN, "<")
    own = [frame for frame in frames if not frame.filename.startswith(prefixes)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
