"""The modules that programs can import. All are loaded before the first fork, because programs
cannot open files.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import site
import sys
from collections.abc import Sequence

_NAMES = """
    abc argparse array ast asyncio base64 binascii bisect builtins calendar cmath codecs
    collections collections.abc colorsys concurrent.futures.thread contextlib contextvars copy
    copyreg csv ctypes dataclasses datetime decimal difflib dis enum errno fcntl fnmatch fractions
    functools gc graphlib hashlib heapq hmac html html.parser inspect io ipaddress itertools json
    keyword linecache locale logging math mmap numbers operator os os.path pathlib pickle platform
    pprint queue random re reprlib resource sched secrets select selectors shlex signal site socket
    statistics string stringprep struct subprocess sys tempfile textwrap threading time timeit token
    tokenize traceback types typing unicodedata unittest urllib.parse uuid warnings weakref
    xml.etree.ElementTree zlib zoneinfo _strptime
    encodings.ascii encodings.cp1252 encodings.idna encodings.latin_1 encodings.punycode
    encodings.raw_unicode_escape encodings.unicode_escape encodings.utf_16 encodings.utf_16_be
    encodings.utf_16_le encodings.utf_32 encodings.utf_8_sig encodings.hex_codec encodings.rot_13
"""
PRELOADED = _NAMES.split()
"""Standard-library modules. Those that need files, sockets or processes import but fail in use."""


def load(path: Sequence[str], packages: Sequence[str]) -> None:
    """Import everything, then clear the import paths.

    Args:
        path: where to look for `packages`, after the standard library.
        packages: additional modules to import.

    Raises:
        ImportError: one of `packages` cannot be imported.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    sys.path += [entry for entry in path if entry not in sys.path]
    for name in packages:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package may raise anything
            kind = type(error).__name__
            raise ImportError(f"preload: cannot import {name} ({kind}: {error})") from error
    if "numpy" in packages:
        importlib.import_module("numpy.random")  # numpy loads it lazily
    site.setquit()  # `exit` and `quit`, which -S leaves out
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.argv[:] = [""]
    os.environ.clear()
    gc.collect()
    gc.freeze()  # otherwise a collection in a child would write to every page and so copy it


def open_standard_streams() -> None:
    """Bind sys.stdin and sys.stdout to descriptors 0 and 1. Call this before confining the process.

    Also caches `os.fstat` for both, for programs that use `os.fstat(0)` to size their input:
    glibc's `fstat` uses a syscall that also takes paths, which the filter refuses.
    """
    stats = {0: os.fstat(0), 1: os.fstat(1)}

    def fstat(fd: int) -> os.stat_result:
        if fd not in stats:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return stats[fd]

    os.fstat = fstat
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8")
