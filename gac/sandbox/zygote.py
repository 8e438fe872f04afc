"""The fork server: a process without torch that forks a confined child for every program.

`server.Server` starts it with this folder as a standalone package. It loads what programs may
import, drops root, verifies the confinement on a child, and then serves requests. Requests arrive
on a socket together with the file descriptors that the children need. This process never reads
their contents.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import confine, judge, modules, solver
from .row import JudgeSpec, compile_row

COUNT_EVERY = 1.0  # seconds between counts of a shared uid's threads
WARM_UP = 4  # runs before the first fork; without them a program with tests takes 9% more CPU
SPARE_TASKS = 256  # threads that other processes of a shared uid may start between two counts
# exit status of a judge whose solver closed the channel; such a solver exits by itself
SOLVER_ENDED = 3


@dataclass
class Job:
    """A running program: its processes, its deadline and where to send the result."""

    reply: int
    wall_seconds: float
    """Wall-clock limit in seconds, not counting time spent waiting for a core."""
    max_wall_seconds: float
    """Hard wall-clock limit in seconds."""
    pids: list[int]
    """The process whose exit completes the job comes last."""
    ends: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Pid -> wait status, CPU seconds."""
    finished: bool = False
    """Whether the last process has exited, so that the others are no longer needed."""
    stalled: bool = False

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + self.wall_seconds

    def running(self) -> list[int]:
        """Pids of the job's processes that are not reaped yet; the kernel cannot reuse them."""
        return [pid for pid in self.pids if pid not in self.ends]

    def overdue(self, now: float) -> bool:
        """Whether the job's time is up, not counting the time that it waited for a core."""
        if self.deadline > now:
            return False
        waited = sum(map(_seconds_without_core, self.running()))
        self.deadline = self.started + min(self.wall_seconds + waited, self.max_wall_seconds)
        return self.deadline <= now

    def kill(self) -> None:
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)

    def end(self, pid: int, status: int, seconds: float) -> None:
        """Record that a process has ended."""
        if self.finished and status == signal.SIGKILL:
            status = 0  # it was killed because it was no longer needed
        self.ends[pid] = status, seconds
        if pid == self.pids[-1] and os.waitstatus_to_exitcode(status) != SOLVER_ENDED:
            self.finished = True
            self.kill()


class Zygote:
    """Forks children for requests on `control` until the socket closes or the trainer dies.

    Each child runs under a uid of its own if the server is root and may change uids. Otherwise all
    run under the server's uid, where limits on threads cannot be exact.
    """

    def __init__(self, control: socket.socket, user: int | None) -> None:
        self.control, self.user = control, user
        self.null = os.open(os.devnull, os.O_RDWR)
        self.base_bytes = _address_space()
        self.layers: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.rules: int | None = None
        self.filter = b""
        self.uids: range | None = None
        self.uid_of: dict[int, int] = {}
        self.counted, self.others = 0.0, 0
        self.jobs: dict[int, Job] = {}

    # -- confinement -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Drop this process's privileges and prepare what children need to confine themselves."""
        self.filter = confine.compile_filter()
        self.layers["seccomp"] = "seccomp"
        for layer, take in (("landlock", self._prepare_landlock), ("uid", self._prepare_uid)):
            try:
                self.layers[layer] = take()
            except OSError as error:
                self.missing[layer] = error.strerror or str(error)
        confine.set_capabilities(0 if self.uids is None else confine.CAN_SWITCH)
        confine.no_new_privileges()

    def _prepare_landlock(self) -> str:
        self.rules = confine.landlock_rules()
        return f"Landlock {confine.landlock_abi()}"

    def _prepare_uid(self) -> str:
        if os.getuid() != 0:
            return f"uid {os.getuid()}"
        best, other = confine.unused_uids(int.from_bytes(os.urandom(2), "big"))
        try:
            confine.drop_root(best[0])
            self.uids = best
        except OSError:  # not in the user namespace of this container
            confine.drop_root(other[0])
            self.uids = other
        return f"uids {self.uids[0]} to {self.uids[-1]}"

    def confine(self, kept: Sequence[int], cpu_seconds: int, memory_bytes: int) -> None:
        """Confine this child process: it can only compute and use the descriptors `kept`."""
        confine.close_all_but([0, 1, 2, *kept, *([] if self.rules is None else [self.rules])])
        confine.set_limits(cpu_seconds, self.base_bytes + memory_bytes, self._max_tasks())
        confine.no_new_privileges()
        if self.rules is not None:
            confine.apply_landlock(self.rules)
            os.close(self.rules)
        confine.install_filter(self.filter)

    # -- children ----------------------------------------------------------------------------------

    def fork(self, body: Callable[[], int | None]) -> int:
        """Fork a child that runs `body` and exits with its return value; returns the pid."""
        uid = self._next_uid()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.uid_of[pid] = uid
            return pid
        status = 1
        try:
            random.seed(0)  # Python reseeds it after a fork, but verdicts must be reproducible
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self.uids is not None:
                confine.switch_to_uid(uid)
            confine.exit_with_parent(parent)
            status = body() or 0
        finally:
            os._exit(status)

    def _next_uid(self) -> int:
        """A uid for the next child: one of its own, or the server's if uids cannot be changed.

        The kernel's limit on threads is per uid. If children share one, those with too many threads
        are killed here.
        """
        if self.uids is not None:
            used = set(self.uid_of.values())
            return next(uid for uid in self.uids[1:] if uid not in used)
        if self.counted < time.monotonic():
            self.counted = time.monotonic() + COUNT_EVERY
            threads = confine.threads_of(os.getuid())
            for pid in self.uid_of:
                if threads.pop(pid, 0) > confine.THREADS:
                    os.kill(pid, signal.SIGKILL)
            self.others = sum(threads.values())
        return os.getuid()

    def _max_tasks(self) -> int:
        """RLIMIT_NPROC for a child: the maximum number of threads of its uid."""
        if self.uids is not None:
            return confine.THREADS
        return self.others + SPARE_TASKS + (len(self.uid_of) + 1) * confine.THREADS

    def start(self, request: dict[str, Any], files: list[int]) -> Job:
        """Fork the processes for a request; `files` are its descriptors, the reply pipe first."""
        reply, program, given, result = files
        memory = request["memory_bytes"]

        def child(body: Callable[[], int | None], *kept: int, **streams: int) -> int:
            def run() -> int | None:
                for number, name in enumerate(("stdin", "stdout", "stderr")):
                    os.dup2(streams.get(name, self.null), number)
                modules.adapt(memory)
                self.confine(kept, request["cpu_seconds"], memory)
                return body()

            return self.fork(run)

        def run_judge() -> int:
            verdict, ended = judge.judge(_read(given), to_judge[0], to_solver[1])
            os.write(result, json.dumps(verdict).encode())
            return SOLVER_ENDED if ended else 0

        pids: list[int] = []
        pipes: list[int] = []
        try:
            if request["kind"] == "script":
                pids.append(
                    child(
                        lambda: solver.run_script(json.loads(_read(program))),
                        program,
                        stdin=given,
                        stdout=result,
                    )
                )
            else:
                to_solver, to_judge = os.pipe(), os.pipe()
                pipes += [*to_solver, *to_judge]
                ends = to_solver[0], to_judge[1]
                pids.append(
                    child(
                        lambda: solver.Solver(json.loads(_read(program)), *ends).serve(),
                        program,
                        *ends,
                    )
                )
                pids.append(child(run_judge, given, result, to_judge[0], to_solver[1]))
        except OSError:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise
        finally:
            for end in pipes:
                os.close(end)
        return Job(reply, request["wall_seconds"], request["most_seconds"], pids)

    # -- serving -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the other end closes the socket or the trainer process dies."""
        wake, wakened = os.pipe()
        os.set_blocking(wakened, False)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for number in (self.control.fileno(), wake, self.user):
            if number is not None:
                poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll(self._next_deadline()):
                if number == wake:
                    os.read(wake, 4096)
                elif number == self.user or not self._accept():
                    return  # children die with this process
            self._reap()
            self._stop_stalled()

    def _next_deadline(self) -> int | None:
        """Milliseconds until the next deadline; None if there is none."""
        times = [job.deadline for job in self.jobs.values() if not job.stalled]
        return max(0, int(1000 * (min(times) - time.monotonic())) + 1) if times else None

    def _accept(self) -> bool:
        message, files, _, _ = socket.recv_fds(self.control, 1 << 16, 8)
        if not message:
            return False
        request = json.loads(message)
        try:
            job = self.start(request, files)
        except OSError as error:  # no process or no pipe: the machine is at fault, not the program
            _reply(files[0], {"failed": f"cannot start a process: {error.strerror}"})
        else:
            self.jobs |= dict.fromkeys(job.pids, job)
        for number in files[1:]:
            os.close(number)
        return True

    def _reap(self) -> None:
        while self.jobs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            self.uid_of.pop(pid, None)
            job = self.jobs.pop(pid, None)
            if job is not None:  # else it is the orphan of a process that has exited
                job.end(pid, status, usage.ru_utime + usage.ru_stime)
                if not job.running():
                    _reply(job.reply, {"ends": list(job.ends.values()), "stalled": job.stalled})

    def _stop_stalled(self) -> None:
        now = time.monotonic()
        for job in self.jobs.values():
            if job.overdue(now):  # killing a job again does no harm
                job.stalled = True
                job.kill()


def _seconds_without_core(pid: int) -> float:
    """Seconds that this process was runnable but waited for a core, if the kernel reports it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _read(file: int) -> bytes:
    """Read a memfd. This moves the shared file offset, which the trainer watches."""
    with os.fdopen(file, "rb", buffering=0) as stream:
        return stream.read()


def _reply(file: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the trainer is no longer waiting
        os.write(file, json.dumps(message).encode())
    os.close(file)


def _address_space() -> int:
    """Size in bytes of this process's address space, which its children inherit."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _warm_up() -> None:
    """Run a program and its tests a few times in this process.

    Python specializes bytecode in place while it runs. If that has already happened in this
    process, its children write to fewer of the shared pages.
    """
    row = compile_row(JudgeSpec(("assert f(2) == 4",)))
    stdout = sys.stdout
    for _ in range(WARM_UP):
        (questions, to_solver), (answers, to_judge) = os.pipe(), os.pipe()
        peer = solver.Solver({"text": "def f(x): return 2 * x"}, questions, to_judge)
        thread = threading.Thread(target=peer.serve)
        thread.start()
        judge.judge(row, answers, to_solver, guard=False)
        thread.join()
        peer.close()
    sys.stdout = stdout
    for name in ("program", "__tests__"):
        del sys.modules[name]


def main(options: dict[str, Any]) -> None:
    """Load modules, drop privileges, verify the confinement, report it, then serve."""
    control = socket.socket(fileno=options["control"])
    try:
        os.chdir("/")
        modules.load(options["path"], options["preload"])
        sys.set_int_max_str_digits(0)  # so that integers of any size can be sent
        judge.inspect_remotely()
        _warm_up()
        # otherwise a collection in a child would write to every page and so copy it; collections
        # during the imports would find nearly nothing
        gc.freeze()
        gc.enable()
        # if memory runs out, programs should die first; children inherit this
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        zygote = Zygote(control, options["user"])
        zygote.prepare()
        confine.verify_confinement(zygote.fork, zygote.confine)
        zygote.uid_of.clear()
    except (OSError, ImportError) as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    control.send(json.dumps({"layers": zygote.layers, "missing": zygote.missing}).encode())
    zygote.serve()
