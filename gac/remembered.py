"""Help text that takes seconds to make, because torch is imported for it, kept between commands.

The text depends on the source files alone, so it is kept under their names, sizes and times in
the user's cache; whatever goes wrong there only costs the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).parent


def remembered(name: str, make: Callable[[], str]) -> str:
    """`make()`, or what it returned for the same sources before. name: fit for a file."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gac"
    path = folder / f"{name}-{_sources()}.txt"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    text = make()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{name}-{'?' * 16}.txt"):
            old.unlink()
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return text


def _sources() -> str:
    """A hash of which source files there are, how long they are, and when they were written."""
    digest = hashlib.sha256(sys.version.encode())
    for package in (PACKAGE, PACKAGE.with_name("gac_kernels")):
        for path in sorted(package.rglob("*.py")):
            found = path.stat()
            digest.update(f"{path}:{found.st_size}:{found.st_mtime_ns};".encode())
    return digest.hexdigest()[:16]
