"""Test data: sandbox escape attempts, run by `test_escapes.py`. See also `fakes`.

A script that dies early would look contained, so each one reports its progress: one line per
operation, then END.
"""

# A script is PRELUDE, then one `attempt(...)` per line of an entry of SYSTEM, then END.
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, pathlib, platform, resource, select, signal, socket
import struct, subprocess, sys, tempfile, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p
parent = os.getppid()
buffer = ctypes.create_string_buffer(4096)

def check(result):
    if result is None or result is False or result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result

def call(number, *arguments):
    ctypes.set_errno(0)
    return check(libc.syscall(ctypes.c_long(number), *map(word, arguments)))

def word(value):
    return ctypes.c_long(value) if isinstance(value, int) else value

def attempt(label, operation):
    try:
        done = operation()
    except OSError as error:
        print("refused", errno.errorcode.get(error.errno or 0, type(error).__name__), label)
    except BaseException as error:
        print("broken", type(error).__name__, error, label)
    else:
        print("DONE", label, repr(done)[:60])
    sys.stdout.flush()
"""
END = "print('END')\nsys.stdout.flush()\n"

# name -> operations, one expression per line. A line that starts with + succeeds when the sandbox
# layers are disabled, which proves that the attempt is real. System call numbers are for x86-64.
SYSTEM = {
    "read files": """
+ open("/etc/passwd").read()
+ os.open("/etc/hostname", os.O_RDONLY)
+ pathlib.Path("/etc/passwd").read_bytes()
+ open("/proc/cpuinfo").readline()
+ open("/dev/zero", "rb").read(1)
  open("/proc/self/environ").read()
  open("/proc/self/mem", "rb")
  open(f"/proc/{parent}/environ").read()
  open(f"/proc/{parent}/maps").read()
""",
    "list folders": """
+ os.listdir("/")
+ list(os.scandir("/etc"))
+ next(pathlib.Path("/").iterdir())
+ os.open("/", os.O_DIRECTORY)
+ os.open("/tmp", os.O_PATH)
""",
    "stat paths": """
+ os.stat("/")
+ os.lstat("/etc/passwd")
+ os.statvfs("/")
+ os.readlink("/proc/self/exe") and 1
+ check(libc.access(b"/etc/passwd", 4) == 0)
+ call(332, -100, b"/", 0, 0xFFF, buffer)
+ call(262, -100, b"/etc/passwd", buffer, 0)
  os.getxattr("/etc/passwd", "security.capability")
""",
    "write files": """
+ tempfile.TemporaryFile().write(b"1")
+ os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
+ os.open("/dev/null", os.O_WRONLY)
  open("/etc/passwd", "a")
  os.truncate("/etc/passwd", 0)
  os.open("/dev/shm/gac-escape", os.O_CREAT | os.O_RDWR)
  call(85, b"/tmp/gac-escape", 0o600)
""",
    "create and remove paths": """
  os.mkdir("/tmp/gac-escape-folder")
  os.rmdir("/tmp/gac-escape-folder")
  os.unlink("/etc/passwd")
  os.rename("/etc/passwd", "/etc/passwd-")
  os.link("/etc/passwd", "/tmp/gac-escape")
  os.symlink("/etc/passwd", "/tmp/gac-escape")
  os.mkfifo("/tmp/gac-escape")
  os.mknod("/tmp/gac-escape")
""",
    "change modes": """
  os.chmod("/etc/passwd", 0o666)
  os.chown("/etc/passwd", os.getuid(), -1)
  os.utime("/etc/passwd")
  os.setxattr("/etc/passwd", "user.gac", b"1")
+ check(libc.umask(0o22) >= 0)
  os.fchmod(1, 0o600)
""",
    "change directory": """
+ os.chdir("/tmp")
+ os.getcwd()
  os.chroot("/tmp")
  call(155, b"/", b"/")
""",
    "sockets": """
+ socket.socket(socket.AF_INET, socket.SOCK_STREAM)
+ socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
+ socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
+ socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
+ socket.socketpair()
  socket.socket(socket.AF_INET, socket.SOCK_RAW)
  socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
  socket.socket(40, socket.SOCK_STREAM)
""",
    "network": """
+ socket.create_server(("127.0.0.1", 0))
  socket.create_connection(("127.0.0.1", 1), timeout=1)
  socket.create_connection(("192.0.2.1", 80), timeout=1)
  socket.socket(socket.AF_UNIX).connect("\\0gac-escape")
  call(44, 1, b"x", 1, 0, 0, 0)
  call(288, 0, 0, 0, 0)
""",
    "processes": """
+ os.fork() or os._exit(0)
+ call(56, signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)
  call(435, struct.pack("=11Q", 0x10000000, *[0] * 10), 88)
  call(56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
  call(56, 0x00000100 | signal.SIGCHLD, 0, 0, 0, 0)
  os.forkpty()
""",
    "programs": """
+ subprocess.run(["/bin/true"], check=True)
+ os.posix_spawn("/bin/true", ["true"], {})
+ check(os.system("true") == 0)
  os.execv("/nonexistent", ["x"])
  call(322, -100, b"/nonexistent", 0, 0, 0)
""",
    "signals": """
  os.kill(parent, 0)
+ os.kill(os.getpid(), 0)
+ os.pidfd_open(parent)
+ call(234, os.getpid(), threading.get_native_id(), 0)
+ call(200, threading.get_native_id(), 0)
  os.kill(1, 0)
  os.kill(parent, signal.SIGSTOP) if os.getpid() == 0 else call(62, 1, 0)
  call(129, parent, 0, buffer)
""",
    "fcntl and signals via descriptors": """
+ fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
+ fcntl.fcntl(0, 10, 0)
+ fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK)
+ fcntl.fcntl(0, fcntl.F_DUPFD, 10)
+ fcntl.fcntl(0, 15, struct.pack("=ii", 1, os.getpid()))
  fcntl.fcntl(0, 1024, 1)
""",
    "other processes' memory": """
  call(101, 16, parent, 0, 0)
  call(101, 0x4206, parent, 0, 0)
  call(310, parent, buffer, 0, buffer, 0, 1)
  call(311, parent, buffer, 0, buffer, 0, 1)
  call(312, parent, os.getpid(), 0, 0, 0)
  call(438, 0, 0, 0)
  call(440, 0, buffer, 0, 4, 0)
  call(448, 0, 0)
""",
    "code in memory": """
+ check(libc.mmap(None, ctypes.c_size_t(4096), 7, 0x22, -1, 0) != 2**64 - 1)
+ check(libc.mprotect(ctypes.c_void_p(ctypes.addressof(buffer) & -4096), 4096, 7) == 0)
+ mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)
+ os.memfd_create("code")
  call(329, ctypes.c_void_p(ctypes.addressof(buffer) & -4096), 4096, 7, 1)
  call(447, 0)
""",
    "other open system calls": """
+ call(2, b"/etc/passwd", 0, 0)
+ call(257, -100, b"/etc/passwd", 0, 0)
+ call(437, -100, b"/etc/passwd", bytes(24), 24)
+ call(303, -100, b"/etc", struct.pack("=Ii", 128, 0) + bytes(128), buffer, 0)
  call(304, -100, buffer, 0)
  call(428, -100, b"/", 0)
""",
    "epoll, eventfd and io_uring": """
+ call(291, 0)
+ call(290, 0, 0)
+ call(283, 1, 0)
+ call(289, -1, bytes(8), 8, 0)
+ call(294, 0)
  call(425, 4, bytes(120))
  call(206, 4, bytes(8))
  call(323, 0)
  call(300, 0, 0)
""",
    "kernel surface": """
  call(321, 0, bytes(128), 128)
  call(298, bytes(128), 0, -1, -1, 0)
  call(248, b"user", b"gac", b"x", 1, -3)
  call(249, b"user", b"gac", 0, 0)
  call(250, 0, -3, 0)
  call(175, buffer, 0, b"")
  call(313, 0, b"", 0)
  call(246, 0, 0, 0, 0)
  call(103, 3, buffer, 100)
  call(212, 0, b"", 0)
""",
    "namespaces": """
  call(272, 0x10000000)
  call(272, 0x40000000)
  call(308, 0, 0)
  call(165, b"none", b"/tmp", b"tmpfs", 0, 0)
  call(166, b"/proc", 2)
  call(430, b"tmpfs", 0)
  call(429, -100, b"/", -100, b"/tmp", 0)
  call(442, -100, b"/", 0, bytes(32), 32)
""",
    "identity": """
  os.setuid(0)
  os.setgid(0)
  os.setresuid(0, 0, 0)
  os.setgroups([0])
  call(126, struct.pack("=Ii", 0x20080522, 0), b"\\xff" * 24)
+ os.setsid()
+ call(122, os.getuid()) + 1
  os.setpgid(0, 1)
""",
    "process attributes (prctl)": """
+ call(157, 1, 0, 0, 0, 0) + 1
+ call(157, 15, b"gac", 0, 0, 0) + 1
+ call(135, 0xFFFFFFFF) + 1
  call(157, 22, 1, 0, 0, 0)
  call(157, 40, 1, 0, 0, 0)
  call(317, 1, 0, 0)
  call(444, 0, 0, 1)
  call(158, 0x1002, 0)
""",
    "limits": """
  call(302, 0, resource.RLIMIT_CPU, struct.pack("=QQ", 1000, 1000), 0)
  call(302, 0, resource.RLIMIT_AS, struct.pack("=QQ", 1 << 40, 1 << 40), 0)
  call(160, resource.RLIMIT_NPROC, struct.pack("=QQ", 1 << 20, 1 << 20))
+ call(302, 0, resource.RLIMIT_CORE, bytes(16), 0) + 1
+ resource.prlimit(os.getpid(), resource.RLIMIT_CORE)
  resource.prlimit(parent, resource.RLIMIT_CPU, (1, 1))
+ os.setpriority(os.PRIO_PROCESS, 0, 19)
+ os.sched_setaffinity(0, os.sched_getaffinity(0))
  os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
  call(251, 1, 0, 0)
""",
    "shared memory": """
+ call(29, 0, 4096, 0o1600)
+ call(64, 0, 1, 0o1600)
+ call(68, 0, 0o1600)
  call(30, 0, 0, 0)
  call(240, b"gac-escape", 0o102, 0o600, 0)
""",
    "machine-wide settings": """
  call(169, 0xfee1dead, 672274793, 0, 0)
  call(170, b"gac", 3)
  call(164, bytes(16), 0)
  call(227, 0, bytes(16))
  call(167, b"/dev/null", 0)
  call(163, b"/tmp/acct")
+ os.uname()
+ call(99, buffer) + 1
""",
    "devices": """
  fcntl.ioctl(1, 0x5412, b"x")
  fcntl.ioctl(0, 0x541B, bytes(4))
  os.get_terminal_size(1)
  os.openpty()
  os.tcgetpgrp(0)
""",
    "copying between descriptors": """
+ os.pipe()
  os.ftruncate(0, 10) or 1
  os.posix_fallocate(0, 0, 10) or 1
  os.sendfile(1, 0, 0, 10)
  os.splice(0, 1, 10)
  os.copy_file_range(0, 1, 10)
""",
    "inherited descriptors": """
  [os.read(number, 1) for number in range(3, 1024) if call(5, number, buffer) == 0]
  [call(5, number, buffer) for number in (3, 4, 5, 6, 7, 8)]
  call(33, 1, 4096)
  open("/dev/fd/0")
  open("/proc/self/fd/1", "w")
  os.pwrite(0, b"x", 0)
  os.fstat(2)
""",
    "loading code": """
  ctypes.CDLL("libsqlite3.so.0")
  ctypes.CDLL("/lib/x86_64-linux-gnu/libresolv.so.2")
+ open("/usr/lib/os-release").readline()
""",
    "timers and waiting": """
+ call(222, 0, 0, buffer) + 1
+ call(253)
  call(247, 0, 0, 0, 4, 0)
+ call(332, 0, b"", 0x1000, 0xFFF, buffer) + 1
""",
}


def script(name: str) -> str:
    """The script for one entry of SYSTEM."""
    lines = [line for line in SYSTEM[name].splitlines() if line.strip()]
    return PRELUDE + "".join(f"attempt({x[2:]!r}, lambda: {x[2:]})\n" for x in lines) + END


def operations(name: str, *, proven: bool = False) -> list[str]:
    """The operations of one entry of SYSTEM; with `proven`, only those that succeed without the
    sandbox layers.
    """
    lines = [line for line in SYSTEM[name].splitlines() if line.strip()]
    return [line[2:] for line in lines if line.startswith("+") or not proven]


# name -> (script, allowed outcomes). Each has one CPU second; the limits bound its other resource
# use.
MISBEHAVING = {
    "endless loop": ("print('END', flush=True)\nwhile True: pass", {"timeout", "stalled"}),
    "loop that catches every signal": (
        "import signal\n"
        "for n in range(1, 65):\n"
        "    try: signal.signal(n, lambda *a: None)\n"
        "    except (OSError, ValueError): pass\n"
        "print('END', flush=True)\nwhile True: pass",
        {"timeout", "stalled"},
    ),
    "one endless operation": ("print('END', flush=True)\n9**9**9", {"timeout", "stalled"}),
    "one huge allocation": ("print('END', flush=True)\nbytearray(1 << 40)", {"ended"}),
    "many small allocations": (
        "print('END', flush=True)\nkept = []\nwhile True: kept.append(bytearray(1 << 20))",
        {"ended", "crash", "stalled"},
    ),
    "endless recursion": (
        "print('END', flush=True)\ndef f(): f()\nf()",
        {"ended"},
    ),
    "recursion with the limit raised": (
        "import sys\nsys.setrecursionlimit(10**9)\nprint('END', flush=True)\n"
        "class A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        {"ended", "crash", "timeout"},
    ),
    "thread bomb": (
        "import threading, time\n"
        "threading.stack_size(65536)\n"
        "print('END', flush=True)\n"
        "started = 0\n"
        "try:\n"
        "    while started < 5000:\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "        started += 1\n"
        "except RuntimeError: pass\n",
        {"ended", "stalled"},  # the kernel does not limit uid 0's threads; only memory does
    ),
    "fork bomb": (
        "import os\n"
        "for _ in range(100):\n"
        "    try: os.fork()\n"
        "    except OSError: pass\n"
        "    else: os._exit(1)\n"
        "print('END', flush=True)",
        {"ended"},
    ),
    "endless output": (
        "import os\nos.write(1, b'END\\n')\nwhile True: os.write(1, bytes(1 << 20))",
        {"ended"},
    ),
    "segmentation fault": (
        "import ctypes\nprint('END', flush=True)\nctypes.string_at(0)",
        {"crash"},
    ),
    "abort": ("import os\nprint('END', flush=True)\nos.abort()", {"crash"}),
    "x32 system call": (  # x32 ABI: same CPU mode, different system call numbers
        "import ctypes\nprint('END', flush=True)\n"
        "ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 39))\n"
        "while True: pass",
        {"crash"},
    ),
    "deeply nested brackets": (
        "print('END', flush=True)\neval('(' * 10**5 + ')' * 10**5)",
        {"ended"},
    ),
    "long sum": ("print('END', flush=True)\neval('+'.join('1' * 10**5))", {"ended", "crash"}),
}
