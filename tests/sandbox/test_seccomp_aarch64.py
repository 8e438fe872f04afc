"""Interprets the allow-list filter that libseccomp compiles for aarch64, so that no aarch64 machine
is needed.

This shows which system calls the filter allows on aarch64, not that Python runs under it.
"""

import ctypes
import errno
import platform
import struct
import sys
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

from gac.sandbox import confine

AARCH64, X86_64 = 0xC00000B7, 0xC000003E  # linux/audit.h
ALLOWED, KILLED, EPERM = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
ENOSYS = 0x00050000 | errno.ENOSYS
# include/uapi/asm-generic/unistd.h
_CALLS = """
    dup=23 dup3=24 close=57 lseek=62 read=63 write=64 readv=65 writev=66 pread64=67 pwrite64=68
    pselect6=72 ppoll=73 fstat=80 exit=93 exit_group=94 set_tid_address=96 futex=98
    set_robust_list=99 get_robust_list=100 nanosleep=101 getitimer=102 setitimer=103
    clock_gettime=113 clock_getres=114 clock_nanosleep=115 sched_getaffinity=123 sched_yield=124
    restart_syscall=128 sigaltstack=132 rt_sigaction=134 rt_sigprocmask=135 rt_sigreturn=139
    times=153 getrusage=165 getcpu=168 gettimeofday=169 getpid=172 getppid=173 getuid=174
    geteuid=175 getgid=176 getegid=177 gettid=178 brk=214 munmap=215 mremap=216 madvise=233
    getrandom=278 rseq=293
"""
ALLOWED_CALLS = {name: int(number) for name, number in (c.split("=") for c in _CALLS.split())}
DENIED_CALLS = {
    "openat": 56,
    "openat2": 437,
    "newfstatat": 79,
    "statx": 291,
    "execve": 221,
    "execveat": 281,
    "kill": 129,
    "tgkill": 131,
    "tkill": 130,
    "socket": 198,
    "socketpair": 199,
    "pipe2": 59,
    "ptrace": 117,
    "process_vm_readv": 270,
    "memfd_create": 279,
    "io_uring_setup": 425,
    "prctl": 167,
    "seccomp": 277,
    "bpf": 280,
    "unshare": 97,
    "setns": 268,
    "mount": 40,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "ioctl": 29,
    "shmget": 194,
    "pkey_mprotect": 288,
}


class ForAarch64:
    """Wraps libseccomp so that new filters target aarch64; libseccomp translates the system call
    numbers.
    """

    def __init__(self, library):
        self._library = library

        def seccomp_init(action):
            context = library.seccomp_init(action)
            pointer = ctypes.c_void_p(context)
            assert library.seccomp_arch_add(pointer, ctypes.c_uint32(AARCH64)) == 0
            assert library.seccomp_arch_remove(pointer, ctypes.c_uint32(0)) == 0  # the native one
            return context

        library.seccomp_init.restype = ctypes.c_void_p
        self.seccomp_init = seccomp_init

    def __getattr__(self, name):
        return getattr(self._library, name)


@pytest.fixture(scope="module")
def filter_():
    library: Any = ctypes.CDLL(confine.LIBSECCOMP)
    if platform.machine() != "aarch64":
        library = ForAarch64(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *a, **k: library)
        return [struct.unpack_from("=HBBI", one) for one in _instructions(confine.compile_filter())]


def _instructions(program):
    return (program[i : i + 8] for i in range(0, len(program), 8))


def verdict(program, call, *arguments, architecture=AARCH64):
    """Run the filter (the kernel's seccomp subset of classic BPF) on one system call and return its
    verdict.
    """
    data = struct.pack("=IIQ6Q", call, architecture, 0, *[*arguments, *[0] * (6 - len(arguments))])
    accumulator = pc = 0
    while True:
        code, if_true, if_false, constant = program[pc]
        pc += 1
        if code == 0x06:  # return
            return constant
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif code == 0x54:  # and
            accumulator &= constant
        elif code == 0x05:  # jump
            pc += constant
        else:
            conditions = {
                0x15: accumulator == constant,
                0x25: accumulator > constant,
                0x35: accumulator >= constant,
                0x45: bool(accumulator & constant),
            }
            pc += if_true if conditions[code] else if_false


# get_robust_list, clock_gettime, clock_getres, clock_nanosleep, sched_getaffinity
OWN_PROCESS = [100, 113, 114, 115, 123]


def test_some_calls_are_allowed_and_everything_else_is_refused(filter_):
    assert {n for n, number in DENIED_CALLS.items() if verdict(filter_, number) != EPERM} == set()
    assert {n for n in range(1024) if verdict(filter_, n, 99, 0, 7) == ALLOWED} == set(
        ALLOWED_CALLS.values()
    ) - set(OWN_PROCESS)


def test_calls_that_depend_on_their_arguments(filter_):
    clone, clone3, mmap, mprotect, fcntl, prlimit64 = 220, 435, 222, 226, 25, 261
    thread = 0x3D0F00  # glibc: pthread_create; musl adds CLONE_DETACHED
    assert verdict(filter_, clone, thread) == verdict(filter_, clone, thread | 0x400000) == ALLOWED
    # SIGCHLD: a fork; CLONE_NEWUSER: a user namespace
    assert verdict(filter_, clone, 17) == EPERM
    assert verdict(filter_, clone, thread | 0x10000000) == EPERM
    assert verdict(filter_, clone3, 0) == ENOSYS
    for call in (mmap, mprotect):
        assert [verdict(filter_, call, 0, 0, mode) for mode in (1, 3, 4, 7)] == [
            ALLOWED,
            ALLOWED,
            EPERM,
            EPERM,
        ]
    assert [verdict(filter_, fcntl, 0, command) for command in (1, 3, 8, 10)] == [
        ALLOWED,
        ALLOWED,
        EPERM,
        EPERM,
    ]
    for call in OWN_PROCESS:  # a negative clock is the CPU time of another process
        assert {n for n in range(20) if verdict(filter_, call, n) == ALLOWED} == set(
            range(16 if 113 <= call <= 115 else 1)
        )
        for foreign in (16, 99, 0xFFFFFFFA, 2**64 - 6, 2**32):
            assert verdict(filter_, call, foreign) == EPERM
    assert verdict(filter_, prlimit64, 0, 7, 0, 5) == ALLOWED
    assert verdict(filter_, prlimit64, 0, 7, 5, 0) == EPERM
    assert verdict(filter_, prlimit64, 1, 7, 0, 5) == EPERM


@pytest.mark.parametrize("architecture", [X86_64, 0x40000028, 0x40000003])
def test_other_architectures_kill_the_process(filter_, architecture):
    assert verdict(filter_, ALLOWED_CALLS["read"], architecture=architecture) == KILLED
