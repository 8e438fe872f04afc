"""The fork server: a process without torch that forks a confined child for every program.

`server.Server` starts it with this folder as a standalone package. It loads what programs may
import, drops root, verifies the confinement on a child, and then serves requests. Requests arrive
on a socket together with the file descriptors that the children need. This process never reads
their contents.
"""

from __future__ import annotations

import contextlib
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

from . import confine, event_loop, judge, modules, probe, solver, wire

COUNT_EVERY = 1.0  # seconds between counts of a shared uid's threads
WARM_UP = 4  # runs before the first fork; more did not make programs cheaper
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
    main: int
    """The process whose exit completes the job."""
    helper: int | None = None
    """The solver process of a judge."""
    ends: dict[str, list[float]] = field(default_factory=dict)
    """"main", "helper" -> [wait status, CPU seconds]; status 0 for a helper that was killed when no
    longer needed.
    """
    stalled: bool = False

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + self.wall_seconds

    def running(self) -> list[int]:
        """Pids of the job's processes that are not reaped yet; the kernel cannot reuse them."""
        pids = {"main": self.main, "helper": self.helper}
        return [pid for name, pid in pids.items() if pid and name not in self.ends]

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

    def kill_if_crowded(self) -> None:
        """Kill the job if one of its processes has too many threads.

        The kernel's limit is per uid, so it does not bound a single job if jobs share a uid.
        """
        if any(confine.threads_of(pid) > confine.THREADS for pid in self.running()):
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
        self.counted = 0.0, 0
        self.jobs: dict[int, Job] = {}

    # -- confinement -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Drop this process's privileges and prepare what children need to confine themselves."""
        self.filter = confine.compile_filter()
        confine.filter_header(self.filter)
        self.layers["seccomp"] = "seccomp"
        self._try("landlock", self._prepare_landlock)
        self._try("uid", self._prepare_uid)
        confine.set_capabilities(0 if self.uids is None else confine.CAN_SWITCH)
        confine.no_new_privileges()

    def _try(self, layer: str, take: Callable[[], str]) -> None:
        try:
            self.layers[layer] = take()
        except OSError as error:
            self.missing[layer] = error.strerror or str(error)

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

    def fork(self, body: Callable[[], int]) -> int:
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
            status = body()
        finally:
            os._exit(status)

    def _next_uid(self) -> int:
        """A uid for the next child: one of its own, or the server's if uids cannot be changed."""
        if self.uids is not None:
            used = set(self.uid_of.values())
            return next(uid for uid in self.uids[1:] if uid not in used)
        if self.counted[0] < time.monotonic():
            for job in self.jobs.values():
                job.kill_if_crowded()
            others = confine.tasks_of(os.getuid()) - sum(map(confine.threads_of, self.uid_of))
            self.counted = time.monotonic() + COUNT_EVERY, others
        return os.getuid()

    def _max_tasks(self) -> int:
        """RLIMIT_NPROC for a child: the maximum number of threads of its uid."""
        if self.uids is not None:
            return confine.THREADS
        return self.counted[1] + SPARE_TASKS + (len(self.uid_of) + 1) * confine.THREADS

    def start(self, request: dict[str, Any], files: list[int]) -> Job:
        """Fork the processes for a request; `files` are its descriptors, the reply pipe first."""
        cpu, memory = request["cpu_seconds"], request["memory_bytes"]
        times = request["wall_seconds"], request["most_seconds"]
        reply, program, *others = files
        if request["kind"] == "script":
            stdin, stdout = others

            def script() -> int:
                self._redirect(stdin, stdout)
                modules.remember_sizes()
                modules.limit_stacks(memory)
                self.confine([program], cpu, memory)
                return solver.run_script(_read_json(program))

            return Job(reply, *times, main=self.fork(script))

        tests, verdict = others
        to_solver, to_judge = os.pipe(), os.pipe()

        def answer() -> int:
            self._redirect(self.null, self.null)
            modules.limit_stacks(memory)
            self.confine([program, to_solver[0], to_judge[1]], cpu, memory)
            channel = wire.Channel(to_solver[0], to_judge[1])
            solver.answer_questions(_read_json(program), channel)
            return 0

        def run_judge() -> int:
            self._redirect(self.null, self.null)
            self.confine([tests, verdict, to_judge[0], to_solver[1]], cpu, memory)
            channel = wire.Channel(to_judge[0], to_solver[1])
            result = judge.judge(_read_json(tests), channel)
            os.write(verdict, json.dumps(result).encode())
            return SOLVER_ENDED if channel.ended else 0

        try:
            helper = self.fork(answer)
            try:
                return Job(reply, *times, main=self.fork(run_judge), helper=helper)
            except OSError:
                os.kill(helper, signal.SIGKILL)
                raise
        finally:
            for end in (*to_solver, *to_judge):
                os.close(end)

    def _redirect(self, stdin: int, stdout: int) -> None:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(self.null, 2)

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
            self.jobs[job.main] = job
            if job.helper:
                self.jobs[job.helper] = job
        for number in files[1:]:
            os.close(number)
        return True

    def _reap(self) -> None:
        while self.jobs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            job = self._ended(pid, status, usage)
            if job is None:
                continue
            if pid == job.main and job.helper and "helper" not in job.ends:
                if not job.stalled and os.waitstatus_to_exitcode(status) == SOLVER_ENDED:
                    continue  # the solver's exit, which gives the reason, follows
                self._end_helper(job, job.helper)
            if len(job.ends) == 1 + (job.helper is not None):
                _reply(job.reply, {**job.ends, "stalled": job.stalled})

    def _end_helper(self, job: Job, helper: int) -> None:
        """Kill the helper and record status 0; if it has already exited, record its exit status."""
        pid, status, usage = os.wait4(helper, os.WNOHANG)
        if not pid:
            os.kill(helper, signal.SIGKILL)
            _, _, usage = os.wait4(helper, 0)
        self._ended(helper, status if pid else 0, usage)

    def _ended(self, pid: int, status: int, usage: resource.struct_rusage) -> Job | None:
        job = self.jobs.pop(pid, None)
        self.uid_of.pop(pid, None)
        if job is not None:
            name = "main" if pid == job.main else "helper"
            job.ends[name] = [status, usage.ru_utime + usage.ru_stime]
        return job

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


def _read_json(file: int) -> Any:
    """Read JSON from a memfd. This moves the shared file offset, which the trainer watches."""
    parts = []
    while part := os.read(file, 1 << 20):
        parts.append(part)
    os.close(file)
    return json.loads(b"".join(parts))


def _reply(file: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the trainer is no longer waiting
        os.write(file, json.dumps(message).encode())
    os.close(file)


def _address_space() -> int:
    """Size in bytes of this process's address space, which its children inherit."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30


def _warm_up() -> None:
    """Run a program and its tests a few times in this process.

    Python specializes bytecode in place while it runs. If that has already happened in this
    process, its children write to fewer of the shared pages.
    """
    spec = {
        "tests": ["assert f(2) == 4"],
        "setup": "",
        "entry_point": "",
        "reference": "",
        "returns": True,
    }
    stdout = sys.stdout
    for _ in range(WARM_UP):
        questions, to_solver = os.pipe()
        answers, to_judge = os.pipe()
        channel = wire.Channel(questions, to_judge)
        program = {"program": "def f(x): return 2 * x"}
        thread = threading.Thread(target=solver.answer_questions, args=(program, channel))
        thread.start()
        judge.judge({**spec, "all": False}, wire.Channel(answers, to_solver), guard=False)
        thread.join()
        channel.close()
    sys.stdout = stdout
    for name in ("program", "__tests__"):
        del sys.modules[name]


def main(options: dict[str, Any]) -> None:
    """Load modules, drop privileges, verify the confinement, report it, then serve."""
    control = socket.socket(fileno=options["control"])
    try:
        os.chdir("/")
        modules.load(options["path"], options["preload"])
        event_loop.install()
        sys.set_int_max_str_digits(0)  # so that integers of any size can be sent
        judge.inspect_remotely()
        _warm_up()
        modules.settle()
        # if memory runs out, programs should die first; children inherit this
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        zygote = Zygote(control, options["user"])
        zygote.prepare()
        probe.verify_confinement(zygote.fork, zygote.confine)
        zygote.uid_of.clear()
    except (OSError, ImportError) as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    control.send(json.dumps({"layers": zygote.layers, "missing": zygote.missing}).encode())
    zygote.serve()
