"""Replaces attributes of another library, reversibly."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any

_originals: dict[tuple[ModuleType | type, str], Any] = {}


def supported(module: str, *names: str) -> Any:
    """Import a module of another library, if it has these names.

    Raises:
        ImportError: the library is not installed, or its version has no such names.
    """
    try:
        found = import_module(module)
        for name in names:
            getattr(found, name)
    except (ImportError, AttributeError) as error:
        library = module.partition(".")[0]
        raise ImportError(
            f"apply_fused_head does not support the installed {library}: {error}"
        ) from error
    return found


def original(owner: ModuleType | type, name: str) -> Any:
    """The attribute of another library, whether or not it is replaced now."""
    return _originals.get((owner, name), getattr(owner, name))


class Patch(AbstractContextManager["Patch"]):
    """Attributes replaced by ours until `undo`, or the end of a `with` block.

    Applying the same patch again is a no-op.

    Args:
        replacements: owner (a module or a class), attribute name, new value.
    """

    def __init__(self, *replacements: tuple[ModuleType | type, str, Any]) -> None:
        self._replacements = replacements
        for owner, name, new in replacements:
            current = getattr(owner, name)
            if current is not new:
                _originals[owner, name] = current
                setattr(owner, name, new)

    def undo(self) -> None:
        """Restore the original attributes; a second call is a no-op."""
        for owner, name, new in self._replacements:
            if getattr(owner, name) is new:
                setattr(owner, name, _originals.pop((owner, name)))

    def __exit__(self, *_: object) -> None:
        self.undo()
