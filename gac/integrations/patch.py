"""Replaces attributes of another library, reversibly."""

from __future__ import annotations

from types import ModuleType, TracebackType
from typing import Any

_originals: dict[tuple[int, str], Any] = {}


class Patch:
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
                _originals[id(owner), name] = current
                setattr(owner, name, new)

    def undo(self) -> None:
        """Restore the original attributes; a second call is a no-op."""
        for owner, name, new in self._replacements:
            if getattr(owner, name) is new:
                setattr(owner, name, _originals[id(owner), name])

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()
