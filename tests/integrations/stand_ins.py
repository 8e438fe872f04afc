"""Stand-ins for packages that the test environment lacks, while one of our adapters is imported."""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest


@contextlib.contextmanager
def modules(contents: Mapping[str, Mapping[str, Any]], adapter: str) -> Iterator[Any]:
    """Import `adapter` anew, with modules of the given names and attributes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in contents.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                if path not in contents or path == name:
                    patch.setitem(sys.modules, path, ModuleType(path))
            vars(sys.modules[name]).update(attributes)
        parent, _, name = adapter.rpartition(".")
        package = importlib.import_module(parent)
        patch.delitem(sys.modules, adapter, raising=False)
        patch.delattr(package, name, raising=False)
        yield importlib.import_module(adapter)
        sys.modules.pop(adapter, None)
        vars(package).pop(name, None)
