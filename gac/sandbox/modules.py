"""The modules that programs can import.

All are loaded before the first fork, because programs cannot open files.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import builtins
import contextlib
import errno
import importlib
import io
import os
import resource
import site
import sys
import threading
from collections.abc import Sequence
from typing import Any

_STACK_BYTES = 2 << 20  # of a thread that does not ask for more
_set_stack_size = _thread.stack_size
_largest_stack = [_STACK_BYTES]
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}

PRELOADED = """
    abc argparse array ast asyncio atexit base64 binascii bisect builtins calendar cmath
    codecs
    collections collections.abc colorsys concurrent.futures.thread contextlib contextvars copy
    copyreg csv ctypes dataclasses datetime decimal difflib dis enum errno fcntl fileinput fnmatch
    fractions
    functools gc graphlib hashlib heapq hmac html html.parser inspect io ipaddress itertools json
    keyword linecache locale logging math mmap numbers operator os os.path pathlib pickle platform
    pprint queue random re reprlib resource sched secrets select selectors shlex signal site socket
    statistics string stringprep struct subprocess sys tempfile textwrap threading time timeit token
    tokenize traceback types typing unicodedata unittest urllib.parse uuid warnings weakref
    xml.etree.ElementTree zlib zoneinfo _strptime
    bdb bz2 cmd code codeop compileall concurrent.futures configparser cProfile doctest
    email.message email.utils encodings filecmp getopt getpass gettext glob grp gzip html.entities
    http http.cookies importlib.resources logging.handlers lzma marshal mimetypes modulefinder
    multiprocessing netrc opcode optparse pickletools pkgutil plistlib posixpath profile pstats pty
    pwd pyclbr quopri rlcompleter runpy shelve shutil stat symtable sysconfig tabnanny
    tarfile tomllib trace tracemalloc tty unittest.mock unittest.async_case urllib.error
    urllib.response wave webbrowser xml.dom.minidom xml.sax xmlrpc.client zipapp zipfile
    encodings.ascii encodings.cp1252 encodings.idna encodings.latin_1 encodings.punycode
    encodings.raw_unicode_escape encodings.unicode_escape encodings.utf_16 encodings.utf_16_be
    encodings.utf_16_le encodings.utf_32 encodings.utf_8_sig encodings.hex_codec encodings.rot_13
"""
"""Standard-library modules. Those that need files, sockets or processes can be imported, but fail
when used.
"""


def load(path: Sequence[str], packages: Sequence[str]) -> None:
    """Import all modules that programs may use, then clear the import paths.

    Args:
        path: where to look for `packages`, after the standard library.
        packages: additional modules to import.

    Raises:
        ImportError: one of `packages` cannot be imported.
    """
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # left out of this build of Python
            importlib.import_module(name)
    sys.path += [entry for entry in path if entry not in sys.path]
    numpy = ("ma", "random", "testing", "char") if "numpy" in packages else ()  # loaded lazily
    for name in [*packages, *(f"numpy.{module}" for module in numpy)]:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package may raise anything
            raise ImportError(
                f"preload: cannot import {name} ({type(error).__name__}: {error})"
            ) from error
    _replace_functions()
    asyncio.DefaultEventLoopPolicy._loop_factory = EventLoop  # type: ignore[attr-defined] # private
    atexit._clear()  # of the modules: nothing of theirs is left to do, and it takes time
    site.setquit()  # `exit` and `quit`, which -S leaves out
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.argv[:] = [""]
    os.environ.clear()


def _replace_functions() -> None:
    """Open the standard streams and replace functions that rely on blocked system calls."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
    # Python sets both modes at startup; typeshed declares them read-only
    sys.stdin.mode, sys.stdout.mode = "r", "w"  # type: ignore[misc]
    # programs that replace sys.stdout find the original here, which typeshed declares final
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout  # type: ignore[misc]

    def stack_size(size: int = 0) -> int:
        return _set_stack_size(min(size or _STACK_BYTES, _largest_stack[0]))

    threading.stack_size = _thread.stack_size = stack_size
    set_limit, open_file = resource.setrlimit, builtins.open
    resource.setrlimit = lambda kind, limits: (  # the main thread's stack is already large
        None if kind == resource.RLIMIT_STACK else set_limit(kind, limits)
    )

    def open_stream(file: Any, *arguments: Any, **options: Any) -> Any:
        return open_file(
            _STREAMS.get(file, file) if isinstance(file, str) else file, *arguments, **options
        )

    builtins.open = io.open = open_stream


def adapt(memory_bytes: int) -> None:
    """Adapt functions to the limits of this process. Call this before confining it.

    The stack of each thread is limited to a quarter of the memory: programs ask for far more than
    they use, and the memory limit counts address space. `os.fstat(0)` and `os.fstat(1)`, which
    programs use to get the size of their input, return what they return now: glibc's `fstat` uses a
    system call that also takes paths, which the filter refuses.
    """
    _largest_stack[0] = max(memory_bytes // 4, _STACK_BYTES)
    _set_stack_size(_STACK_BYTES)
    stats = {0: os.fstat(0), 1: os.fstat(1)}

    def fstat(fd: int) -> os.stat_result:
        if fd not in stats:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return stats[fd]

    os.fstat = fstat


# -- asyncio ---------------------------------------------------------------------------------------


class EventLoop(asyncio.BaseEventLoop):
    """Runs coroutines, timers and threads without sockets and `epoll`, which the filter refuses.

    Connections, pipes and subprocesses fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self._woken = threading.Event()
        self._selector = self

    def select(self, timeout: float | None = None) -> list[Any]:
        """Wait until the timeout or until another thread wakes the loop."""
        self._woken.wait(timeout)
        self._woken.clear()
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._woken.set()
