"""A lock on a run directory, so that two processes never write to the same one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from gac.errors import RunDirectoryError

logger = logging.getLogger(__name__)
LOCK_FILE = ".lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a run directory; in a distributed job, rank 0 holds it.

    The operating system releases the lock when the process ends, however it ends. The file itself
    stays: deleting it would let a third process lock a new file of the same name.

    Args:
        folder: the run directory, created if needed.

    Raises:
        RunDirectoryError: another process holds the lock; the message names its host and process.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # a folder that is not writable: the checks of the command report it
        yield
        return
    try:
        _acquire(file, folder)
        yield
    finally:
        os.close(file)


def _acquire(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(os.pread(file, 1000, 0))
        raise RunDirectoryError(
            f"{folder}: in use by {holder}; wait until it has finished or use another folder"
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning(
            "%s: this file system does not support locks; never run two processes in one folder",
            folder,
        )
        return
    holder = json.dumps({"host": socket.gethostname(), "process": os.getpid()})
    os.ftruncate(file, 0)
    os.pwrite(file, holder.encode(), 0)


def _holder(text: bytes) -> str:
    try:
        holder = json.loads(text)
        return f"process {holder['process']} on host {holder['host']}"
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another process"


def first_to_report(message: str) -> bool:
    """Whether this process is the first of torchrun's processes to report the error."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_PORT" not in os.environ:
        return True
    import datetime
    import zlib

    from torch.distributed import TCPStore

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"gac/error/{attempt}/{zlib.crc32(message.encode())}"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, timeout=datetime.timedelta(seconds=5))
        return store.add(key, 1) == 1
    except (RuntimeError, ValueError):  # the launcher has exited
        return True
