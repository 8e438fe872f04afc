"""Permanently restricts a process to pure computation: rlimits, Landlock, seccomp, uid.

Calls kernel interfaces through ctypes. The seccomp filter is compiled by libseccomp, which Debian's
`apt` depends on and which is therefore almost always installed. Every function that adds a
restriction raises `OSError` if it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LIBSECCOMP = "libseccomp.so.2"
OUTPUT_BYTES = 64 << 20  # maximum size of a file that a program writes, i.e. of its standard output
STACK_BYTES = 64 << 20  # of the main thread; for programs with deep recursion
OPEN_FILES = 64
THREADS = 64  # per process
# where to look for unused uids, best first, and how many a server takes. By systemd's documentation
# the first ones are unused, and the second ones, which a container may have, for dynamic users.
_UNUSED_UIDS = ((0x70000000, 0x80000000, 4096), (61184, 65520, 128))
CAN_SWITCH = 1 << 5 | 1 << 6 | 1 << 7  # CAP_KILL, CAP_SETGID, CAP_SETUID

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446  # the same on all architectures

_libc = ctypes.CDLL(None, use_errno=True)
_set_limit = resource.setrlimit  # `modules` replaces resource.setrlimit for programs


def _call(function: str, *arguments: object) -> int:
    result = int(getattr(_libc, function)(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return result


def _prctl(option: int, value: int, pointer: object = None) -> None:
    zero = ctypes.c_ulong(0)
    _call("prctl", option, ctypes.c_ulong(value), pointer or zero, zero, zero)


# -- resource limits and process lifetime ----------------------------------------------------------


def set_limits(cpu_seconds: int, memory_bytes: int, tasks: int) -> None:
    """Bound CPU time, address space, output, open files and threads of this process.

    Args:
        cpu_seconds: CPU time after which the kernel kills the process; the soft limit equals the
            hard one because SIGXCPU can be caught.
        memory_bytes: limit on the whole address space.
        tasks: limit on the total threads and processes of this uid (uid 0 is exempt).
    """
    for name, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(name)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        _set_limit(name, (limit, limit))


def exit_with_parent(parent: int) -> None:
    """Kill this process when its parent, pid `parent`, exits. A later change of uid undoes this."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before the call above
        os._exit(1)


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor except `kept`."""
    for low, high in itertools.pairwise([-1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
        if low + 1 < high:  # closerange treats an empty range as unbounded
            os.closerange(low + 1, high)


# -- identity --------------------------------------------------------------------------------------


def drop_root() -> range:
    """Switch to an unused uid and gid, with no supplementary groups; keep only `CAN_SWITCH`.

    Returns:
        Unused uids, of which this process has the first.
    """
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    seed = int.from_bytes(os.urandom(2), "big")
    for low, high, count in _UNUSED_UIDS:
        uid = low + seed % ((high - low) // count) * count
        with contextlib.suppress(OSError):
            os.setresgid(uid, uid, uid)
            switch_to_uid(uid, CAN_SWITCH)
            return range(uid, uid + count)
    raise OSError(errno.EINVAL, "no unused uid is valid in this container")


def switch_to_uid(uid: int, capabilities: int = 0) -> None:
    """Switch to `uid` and keep only `capabilities`."""
    os.setresuid(uid, uid, uid)
    set_capabilities(capabilities)


def set_capabilities(capabilities: int) -> None:
    """Drop all capabilities of this process except the bits of `capabilities`."""
    _call(
        "capset",
        struct.pack("=Ii", 0x20080522, 0),  # version 3, this process
        struct.pack("=6I", capabilities, capabilities, 0, 0, 0, 0),
    )


# -- Landlock --------------------------------------------------------------------------------------


def landlock_abi() -> int:
    """Version of the kernel's Landlock.

    Raises:
        OSError: Landlock is not supported or is disabled.
    """
    return _call("syscall", _LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)


def apply_landlock() -> None:
    """Forbid this process every access that the kernel's Landlock knows."""
    abi = landlock_abi()
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    tcp, scopes = 0b11 * (abi >= 4), 0b11 * (abi >= 6)  # bind, connect; abstract sockets, signals
    # a kernel accepts fields that it does not know if they are 0
    rules = _call(
        "syscall",
        _LANDLOCK_CREATE_RULESET,
        struct.pack("=3Q", files, tcp, scopes),
        ctypes.c_size_t(24),
        0,
    )
    _call("syscall", _LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def no_new_privileges() -> None:
    """Set no_new_privs, which Landlock and seccomp require, and block debuggers."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)


# -- seccomp ---------------------------------------------------------------------------------------

_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LESS, _EQUAL, _MASKED_EQUAL = 2, 4, 7
_BAD_ARCHITECTURE = 2  # seccomp attribute: action for syscalls of other architectures
_OPTIMIZE = 8  # seccomp attribute: how the filter finds a syscall's rules
_NAMES = """
    read write readv writev pread64 pwrite64 lseek fstat close dup dup2 dup3
    poll ppoll select pselect6 _newselect
    brk munmap mremap madvise
    futex futex_time64 set_robust_list rseq set_tid_address gettid
    exit exit_group restart_syscall sched_yield
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack alarm setitimer getitimer
    nanosleep gettimeofday time times getrusage getcpu
    getpid getppid getuid geteuid getgid getegid getrandom
"""
_ALLOWED = _NAMES.split()
# the exact clone flags that glibc and musl use to start a thread
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
_PROT_EXEC = 4
# action, syscall, conditions that must all hold: argument, comparison, value or bits that must be 0
_RULES: tuple[tuple[Any, ...], ...] = (
    *((_ALLOW, "clone", (0, _EQUAL, flags)) for flags in _THREAD_FLAGS),
    (_ALLOW, "mmap", (2, _MASKED_EQUAL, _PROT_EXEC)),
    (_ALLOW, "mprotect", (2, _MASKED_EQUAL, _PROT_EXEC)),
    # F_GETFD; F_SETOWN and F_SETSIG could signal processes of the same uid
    (_ALLOW, "fcntl", (1, _EQUAL, 1)),
    (_ALLOW, "fcntl", (1, _EQUAL, 3)),  # F_GETFL
    # 0 is this thread, and a negative clock the CPU time of any process
    (_ALLOW, "sched_getaffinity", (0, _EQUAL, 0)),
    (_ALLOW, "get_robust_list", (0, _EQUAL, 0)),
    *((_ALLOW, f"clock_{name}", (0, _LESS, 16)) for name in ("gettime", "getres", "nanosleep")),
    # read-only, and only for this process
    (_ALLOW, "prlimit64", (0, _EQUAL, 0), (2, _EQUAL, 0)),
    # clone3 passes its flags through a pointer, which a filter cannot follow; ENOSYS makes libc
    # fall back to clone
    (_ERRNO | errno.ENOSYS, "clone3"),
)


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def compile_filter() -> bytes:
    """Compile the allow-list to BPF. Any other syscall fails with EPERM.

    Raises:
        OSError: libseccomp is missing or returns an error.
    """
    try:
        library = ctypes.CDLL(LIBSECCOMP)
    except OSError as error:
        raise OSError(errno.ENOENT, f"{error}; on Debian: apt install libseccomp2") from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ERRNO | errno.EPERM))
    _check(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, _KILL_PROCESS), "attribute")
    # a binary search instead of a list; libseccomp before 2.5 has no such option
    library.seccomp_attr_set(context, _OPTIMIZE, 2)
    for action, name, *conditions in [*((_ALLOW, name) for name in _ALLOWED), *_RULES]:
        call = library.seccomp_syscall_resolve_name(name.encode())
        if call < 0:  # not a syscall on this architecture
            continue
        _check(
            library.seccomp_rule_add_array(
                context,
                ctypes.c_uint32(action),
                call,
                len(conditions),
                (_Comparison * len(conditions))(*conditions),
            ),
            name,
        )
    with os.fdopen(os.memfd_create("filter"), "rb") as file:
        _check(library.seccomp_export_bpf(context, file.fileno()), "export")
        library.seccomp_release(context)
        return os.pread(file.fileno(), file.tell(), 0)


def _check(code: int, what: str) -> None:
    if code < 0:
        raise OSError(-code, f"libseccomp: {what}: {os.strerror(-code)}")


def install_filter(program: bytes) -> None:
    """Install the filter from `compile_filter` in this process. It cannot be removed."""
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of 8-byte instructions, padding, their address
    _prctl(_PR_SET_SECCOMP, 2, struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))


# -- the probe -------------------------------------------------------------------------------------

_PROBE_SECONDS = 5
_PROBE_MEMORY = 1 << 28
# Neither Landlock nor the uid forbids any of these, so each refusal comes from seccomp.
_ATTEMPTS: dict[str, Callable[[], object]] = {
    "stat": lambda: os.stat("/"),  # noqa: PTH116 - the syscall itself is under test
    "pipe": os.pipe,
    "fork": lambda: os.fork() or os._exit(0),
    "socketpair": socket.socketpair,
    "memfd_create": lambda: os.memfd_create("probe"),
    "kill": lambda: os.kill(os.getpid(), 0),
    "fcntl(F_SETOWN)": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid()),
    "uname": os.uname,
    "getcwd": os.getcwd,
}


def verify_confinement(
    fork: Callable[[Callable[[], int]], int], confine: Callable[[Sequence[int], int, int], None]
) -> None:
    """Check that forbidden calls fail with EPERM in a confined child.

    The caller may make them: without a filter, at least `os.pipe` and `os.fork` would succeed.
    Otherwise this process exits, after the reason was written to standard error.

    Args:
        fork: starts a child that runs a function and exits with its return value; returns the pid.
        confine: confines the child; takes the descriptors to keep, CPU seconds and bytes of memory.
    """

    def attempt_all() -> int:
        try:
            confine([], _PROBE_SECONDS, _PROBE_MEMORY)
            done = [name for name, attempt in _ATTEMPTS.items() if not _is_refused(attempt)]
            problem = f"the seccomp filter does not block {', '.join(done)}" if done else ""
        except OSError as error:
            problem = f"a confined process cannot run here ({error})"
        os.write(2, problem.encode())
        return bool(problem)

    _, status = os.waitpid(fork(attempt_all), 0)
    if status:
        sys.exit(
            f"a confined process cannot run here (wait status {status})"
            if os.WIFSIGNALED(status)
            else 1
        )


def _is_refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError as error:
        return error.errno == errno.EPERM
    return False
