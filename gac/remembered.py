"""Disk cache for help text that takes seconds to build because it imports torch.

The text depends only on the source files, so the cache key is a hash of their names, sizes and
modification times. If the cache cannot be read or written, the text is rebuilt.
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
    """Return `make()`, cached on disk until the sources change. `name` must be a valid file name."""
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
    """Hash of the names, sizes and modification times of the source files."""
    digest = hashlib.sha256(sys.version.encode())
    for package in (PACKAGE, PACKAGE.with_name("gac_kernels")):
        for path in sorted(package.rglob("*.py")):
            found = path.stat()
            digest.update(f"{path}:{found.st_size}:{found.st_mtime_ns};".encode())
    return digest.hexdigest()[:16]
