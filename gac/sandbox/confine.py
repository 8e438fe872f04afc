"""Takes from a process, for good, everything but computing: limits, Landlock, seccomp, identity.

Kernel interfaces by ctypes; the seccomp filter is compiled by libseccomp, which Debian's `apt`
needs and so is nearly everywhere. Every function that takes something away raises `OSError` where
that fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
from collections.abc import Iterable
from pathlib import Path

LIBSECCOMP = "libseccomp.so.2"
OUTPUT_BYTES = 64 << 20  # what a program may write into a file, here its standard output
OPEN_FILES = 64
THREADS = 64

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446  # the same on all architectures

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: object) -> int:
    result = int(getattr(_libc, function)(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return result


def _prctl(option: int, value: int, pointer: object = None) -> None:
    zero = ctypes.c_ulong(0)
    _call("prctl", option, ctypes.c_ulong(value), pointer or zero, zero, zero)


# -- limits and lineage ----------------------------------------------------------------------------


def limit(cpu_seconds: int, memory_bytes: int, tasks: int) -> None:
    """Bound CPU time, address space, output, open files and threads of this process.

    Args:
        cpu_seconds: then the kernel kills it; soft equals hard, as SIGXCPU can be caught.
        memory_bytes: its whole address space.
        tasks: threads and processes that this uid may have in all (uid 0 ignores it).
    """
    for name, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(name)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(name, (value, value))


def die_with(parent: int) -> None:
    """End this process when its parent `parent` ends; a change of uid would undo this."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor except `kept`."""
    low = 0
    for number in sorted(kept):
        if low < number:  # Python reads an empty range as an endless one
            os.closerange(low, number)
        low = number + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


# -- identity --------------------------------------------------------------------------------------


def unused_uid(seed: int) -> int:
    """A uid that no account and no process has, in the range that systemd gives to services."""
    low, high = 61184, 65519
    taken = {int(line.split(":")[2]) for line in _lines("/etc/passwd")}
    taken |= {Path(entry).stat().st_uid for entry in _processes()}
    for offset in range(high - low + 1):
        uid = low + (seed + offset) % (high - low + 1)
        if uid not in taken:
            return uid
    raise OSError(errno.EAGAIN, f"no uid from {low} to {high} is free")


def become(uid: int) -> None:
    """Take `uid` as the only identity, with no group beside it."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Give up every capability; uid 0 may have some without the identity of root's files."""
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3, this process
    _call("capset", header, bytes(24))


def tasks_of(uid: int) -> int:
    """Threads that run under `uid`, as far as /proc shows."""
    count = 0
    for entry in _processes():
        try:
            if Path(entry).stat().st_uid == uid:
                count += len(os.listdir(f"{entry}/task"))  # noqa: PTH208 - it runs per program
        except OSError:  # it ended meanwhile
            continue
    return count


def _processes() -> list[str]:
    try:
        return [str(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    except OSError:
        return []


def _lines(path: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text().splitlines() if line.count(":") > 2]
    except OSError:
        return []


# -- Landlock --------------------------------------------------------------------------------------


def landlock_abi() -> int:
    """The kernel's version of Landlock.

    Raises:
        OSError: it has none, or it is off.
    """
    return _call("syscall", _LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)


def landlock_rules() -> int:
    """A descriptor of the rule set that handles all the kernel knows and allows nothing."""
    abi = landlock_abi()
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    attributes = struct.pack("=Q", files)
    if abi >= 4:
        attributes += struct.pack("=Q", 0b11)  # TCP: bind, connect
    if abi >= 6:
        attributes += struct.pack("=Q", 0b11)  # abstract sockets, signals
    size = ctypes.c_size_t(len(attributes))
    return _call("syscall", _LANDLOCK_CREATE_RULESET, attributes, size, 0)


def no_new_privileges() -> None:
    """Needed by Landlock and seccomp; also closes this process to debuggers of its own uid."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)


def restrict_paths(rules: int) -> None:
    """Put this process under the rule set `rules` of Landlock."""
    _call("syscall", _LANDLOCK_RESTRICT_SELF, rules, 0)


# -- seccomp ---------------------------------------------------------------------------------------

_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_EQUAL, _MASKED_EQUAL = 4, 7
_BAD_ARCHITECTURE = 2  # an attribute: what other calling conventions get


def _refuse(code: int) -> int:
    return 0x00050000 | code


_NAMES = """
    read write readv writev pread64 pwrite64 lseek fstat close dup dup2 dup3
    poll ppoll select pselect6 _newselect
    brk munmap mremap madvise
    futex futex_time64 set_robust_list get_robust_list rseq set_tid_address gettid
    exit exit_group restart_syscall sched_yield sched_getaffinity
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack alarm setitimer getitimer
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getrusage getcpu
    getpid getppid getuid geteuid getgid getegid getrandom
"""
_ALLOWED = _NAMES.split()
# what glibc and what musl ask for when they start a thread, bit for bit
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
_PROT_EXEC = 4
# (call, argument, comparison, mask or value, value): the ways in which a call is allowed
_ALLOWED_IF = (
    *(("clone", 0, _EQUAL, flags, 0) for flags in _THREAD_FLAGS),
    ("mmap", 2, _MASKED_EQUAL, _PROT_EXEC, 0),
    ("mprotect", 2, _MASKED_EQUAL, _PROT_EXEC, 0),
    ("fcntl", 1, _EQUAL, 1, 0),  # F_GETFD; F_SETOWN and F_SETSIG could kill its own uid
    ("fcntl", 1, _EQUAL, 3, 0),  # F_GETFL
)


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def compile_filter() -> bytes:
    """The allow-list as BPF: whatever is not on it fails with EPERM.

    Raises:
        OSError: libseccomp is not there, or refuses.
    """
    try:
        library = ctypes.CDLL(LIBSECCOMP, use_errno=True)
    except OSError as error:
        raise OSError(errno.ENOENT, f"{error}; on Debian: apt install libseccomp2") from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_refuse(errno.EPERM)))
    if not context:
        raise OSError(errno.ENOMEM, "seccomp_init fails")
    try:
        _check(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, _KILL_PROCESS), "attribute")
        for name in _ALLOWED:
            _rule(library, context, _ALLOW, name)
        for name, *comparison in _ALLOWED_IF:
            _rule(library, context, _ALLOW, name, _Comparison(*comparison))
        limits = _Comparison(0, _EQUAL, 0, 0), _Comparison(2, _EQUAL, 0, 0)
        _rule(library, context, _ALLOW, "prlimit64", *limits)  # only ask, only for itself
        # clone3 keeps its flags behind a pointer that a filter cannot follow; ENOSYS: use clone
        _rule(library, context, _refuse(errno.ENOSYS), "clone3")
        file = os.memfd_create("filter")
        try:
            _check(library.seccomp_export_bpf(context, file), "export")
            return os.pread(file, 1 << 20, 0)
        finally:
            os.close(file)
    finally:
        library.seccomp_release(context)


def _rule(
    library: ctypes.CDLL, context: ctypes.c_void_p, action: int, name: str, *ifs: _Comparison
) -> None:
    call = library.seccomp_syscall_resolve_name(name.encode())
    if call < 0:  # this architecture has no such call
        return
    array = (_Comparison * len(ifs))(*ifs)
    code = library.seccomp_rule_add_array(context, ctypes.c_uint32(action), call, len(ifs), array)
    _check(code, name)


def _check(code: int, what: str) -> None:
    if code < 0:
        raise OSError(-code, f"libseccomp: {what}: {os.strerror(-code)}")


def filter_calls(program: bytes) -> None:
    """Put this process, for good, under the filter that `compile_filter` made."""
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of 8-byte instructions, padding, their address
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, 2, header)
