"""Replacements for standard-library functions that also accept proxies, for use in the judge."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import Callable
from typing import Any

from .remote import IMMUTABLE, Remote, RemoteClass, ask

# functions that ask the solver if their argument belongs to the program
_INSPECTING = {
    "dataclasses": "asdict astuple fields is_dataclass replace",
    "inspect": "getdoc getfullargspec isabstract isasyncgen isasyncgenfunction iscoroutine "
    "iscoroutinefunction isfunction isgenerator isgeneratorfunction ismethod signature",
    "typing": "get_type_hints",
}


def is_instance(value: object, kinds: Any) -> bool:
    """`isinstance` for the tests; a proxy for a subclass of `list` counts as a `list`, etc.

    The program decides which of its own classes its objects belong to.
    """
    if isinstance(kinds, tuple):
        return any(is_instance(value, kind) for kind in kinds)
    if isinstance(value, kinds) or not isinstance(value, Remote):
        return isinstance(value, kinds)
    if isinstance(kinds, RemoteClass):
        return ask("isinstance", value, kinds) is True
    standard = [base for kind in type(value).__mro__ for base in vars(kind).get("_standard_", ())]
    return any(issubclass(base, kinds) for base in standard)


def conversion(kind: type) -> Callable[..., Any]:
    """Replacement for the builtin `kind`, e.g. `int`, that converts proxies in the solver."""

    def convert(*arguments: Any, **keywords: Any) -> Any:
        value = arguments[0] if len(arguments) == 1 and not keywords else None
        if not isinstance(value, Remote) or isinstance(value, tuple(IMMUTABLE.values())):
            return kind(*arguments, **keywords)
        converted = ask(f"__{kind.__name__}__", value)
        if type(converted) is not kind:
            raise TypeError(f"__{kind.__name__}__ returned {type(converted).__name__}")
        return converted

    return convert


CONVERSIONS = {kind.__name__: conversion(kind) for kind in (int, float, complex, bytes)}


def inspect_remotely() -> None:
    """Make the functions in `_INSPECTING` ask the solver about the program's objects."""
    for module_name, names in _INSPECTING.items():
        module = importlib.import_module(module_name)
        for name in names.split():
            setattr(module, name, _asking(getattr(module, name)))


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asking(*arguments: Any, **keywords: Any) -> Any:
        if arguments and isinstance(arguments[0], Remote | RemoteClass):
            client, _ = arguments[0]._remote_
            return client.ask("__call__", asking, *arguments, **keywords)
        return function(*arguments, **keywords)

    del asking.__wrapped__
    return asking


def run_coroutines_remotely() -> None:
    """Make `asyncio.run` accept the program's coroutines."""
    run = asyncio.run

    async def awaited(remote: Any) -> Any:
        return await remote

    def local(main: Any) -> Any:
        return awaited(main) if isinstance(main, Remote) else main

    asyncio.run = lambda main, **options: run(local(main), **options)
