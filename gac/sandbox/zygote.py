"""The fork server: a process without torch that forks confined children.

`pool.Server` starts it with this folder as a standalone package. It loads what programs may
import, drops root, verifies the confinement on a child, and then forks a worker for each connection
that the trainer opens. A worker runs one program at a time: it receives a request with the file
descriptors that the children need, forks them, waits and answers. It never reads the contents of
the files, so that its children cannot find them in their memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import marshal
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import confine, judge, modules, solver

CHECK_EVERY = 1.0  # seconds between checks of a program's wall-clock time and threads
SPARE_TASKS = 4096  # threads that all processes of a shared uid may start together
# exit status of a judge whose solver closed the channel; such a solver exits by itself
SOLVER_ENDED = 3


class Zygote:
    """Forks workers, whose children run the programs.

    Each child runs under a uid of its own if the server is root and may change uids. Otherwise all
    run under the server's uid, where limits on threads cannot be exact.
    """

    def __init__(self, layers: dict[str, str]) -> None:
        self.null = os.open(os.devnull, os.O_RDWR)
        # size of the address space, which children inherit
        self.base_bytes = resource.getpagesize() * int(
            Path("/proc/self/statm").read_text().split()[0]
        )
        self.layers = layers
        self.missing: dict[str, str] = {}
        self.uids: range | None = None

    # -- confinement -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Drop this process's privileges and prepare what children need to confine themselves."""
        self.filter = confine.compile_filter()
        self.layers["seccomp"] = "seccomp"
        for layer, take in (
            ("landlock", lambda: f"Landlock {confine.landlock_abi()}"),
            ("uid", self._take_uids),
        ):
            try:
                self.layers[layer] = take()
            except OSError as error:
                self.missing[layer] = str(error.strerror)
        confine.set_capabilities(0 if self.uids is None else confine.CAN_SWITCH)
        confine.no_new_privileges()

    def _take_uids(self) -> str:
        if os.getuid() != 0:
            return f"uid {os.getuid()}"
        self.uids = confine.drop_root()
        return f"uids {self.uids[0]} to {self.uids[-1]}"

    def confine(self, kept: Sequence[int], cpu_seconds: int, memory_bytes: int) -> None:
        """Confine this child process: it can only compute and use the descriptors `kept`."""
        confine.close_all_but([0, 1, 2, *kept])
        confine.set_limits(
            cpu_seconds,
            self.base_bytes + memory_bytes,
            (confine.THREADS if self.uids is not None else _running_tasks() + SPARE_TASKS),
        )
        confine.no_new_privileges()
        if "landlock" in self.layers:
            confine.apply_landlock()
        confine.install_filter(self.filter)

    # -- processes ---------------------------------------------------------------------------------

    def fork(self, body: Callable[[], int | None], uid: int | None = None) -> int:
        """Fork a child that runs `body` and exits with its return value; returns the pid.

        It runs as user number `uid` of `uids`, if given and possible.
        """
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            if uid is not None and self.uids is not None:
                confine.switch_to_uid(self.uids[1 + uid % (len(self.uids) - 1)])
            confine.exit_with_parent(parent)
            status = body() or 0
        finally:
            os._exit(status)

    def serve(self, control: Any, user: int) -> None:
        """Fork workers until the other end closes `control` or the trainer, a pidfd, dies."""
        workers: list[int] = []
        while user not in select.select([control, user], [], [])[0]:
            message, files, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                break
            with socket.socket(fileno=files[0]) as connection:
                workers.append(self.fork(functools.partial(self.work, connection, len(workers))))
        for worker in workers:
            os.kill(worker, signal.SIGKILL)  # its children die with it
            os.waitpid(worker, 0)

    def work(self, connection: socket.socket, number: int) -> None:
        """Run the programs that arrive on `connection`, in worker `number`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # see `_wait`
        while True:
            message, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            if not message:
                return
            request = json.loads(message)
            try:
                pids = self.start(request, files, 2 * number)
                answer = _wait(pids, request["wall_seconds"], request["most_seconds"])
            except OSError as error:  # the machine is at fault, not the program
                answer = {"failed": f"cannot start a process: {error.strerror}"}
            for file in files:
                os.close(file)
            connection.send(json.dumps(answer).encode())

    def start(self, request: dict[str, Any], files: Sequence[int], uid: int) -> list[int]:
        """Fork the processes for a request; the one whose exit completes it comes last.

        They run as users number `uid` and `uid + 1`.
        """
        program, given, result = files

        def child(
            uid: int, body: Callable[[], int | None], *kept: int, streams: Sequence[int] = ()
        ) -> int:
            def run() -> int | None:
                for number, file in enumerate([*streams, *[self.null] * 3][:3]):
                    os.dup2(file, number)
                modules.adapt(request["memory_bytes"])
                self.confine(kept, request["cpu_seconds"], request["memory_bytes"])
                return body()

            return self.fork(run, uid)

        if request["kind"] == "script":
            return [
                child(
                    uid,
                    lambda: solver.run_script(marshal.loads(_read(program))),
                    program,
                    streams=[given, result],
                )
            ]

        ours, theirs = socket.socketpair()

        def run_judge() -> int:
            verdict, ended = judge.judge(_read(given), theirs.fileno())
            os.write(result, json.dumps(verdict).encode())
            return SOLVER_ENDED if ended else 0

        with ours, theirs:
            first = child(
                uid,
                lambda: solver.Solver(marshal.loads(_read(program)), ours.fileno()).serve(),
                program,
                ours.fileno(),
            )
            try:
                return [first, child(uid + 1, run_judge, given, result, theirs.fileno())]
            except OSError:
                os.kill(first, signal.SIGKILL)
                os.waitpid(first, 0)
                raise


def _wait(pids: Sequence[int], wall_seconds: float, most_seconds: float) -> dict[str, Any]:
    """Wait for the children of a program.

    Args:
        pids: the one whose exit completes the program comes last.
        wall_seconds: wall-clock limit, not counting time spent waiting for a core.
        most_seconds: hard wall-clock limit.

    Returns:
        "ends", a list of wait status and CPU seconds, and "stalled", whether a limit was exceeded.
    """
    started, stalled, finished = time.monotonic(), False, False
    ends: dict[int, tuple[int, float]] = {}
    while running := [pid for pid in pids if pid not in ends]:
        if signal.sigtimedwait([signal.SIGCHLD], CHECK_EVERY) is None:
            waited = sum(_about(pid, "schedstat", 1) for pid in running) / 1e9  # for a core
            stalled = stalled or (time.monotonic() - started) > min(
                wall_seconds + waited, most_seconds
            )
            for pid in running:
                if stalled or _about(pid, "stat", 17) > confine.THREADS:
                    os.kill(pid, signal.SIGKILL)
        for pid in running:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if not ended:
                continue
            # what is killed because it is no longer needed has not crashed
            status = 0 if finished and status == signal.SIGKILL else status
            ends[pid] = status, usage.ru_utime + usage.ru_stime
            if pid == pids[-1] and os.waitstatus_to_exitcode(status) != SOLVER_ENDED:
                finished = True
                for other in set(pids) - ends.keys():
                    os.kill(other, signal.SIGKILL)
    return {"ends": list(ends.values()), "stalled": stalled}


def _about(pid: int, file: str, place: int) -> int:
    """A number that the kernel reports about a process, or 0 if it does not report it."""
    try:
        return int(Path(f"/proc/{pid}/{file}").read_text().rpartition(")")[2].split()[place])
    except (OSError, IndexError):
        return 0


def _running_tasks() -> int:
    """Threads of all users, which is at least the number of those of this one."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])


def _read(file: int) -> bytes:
    """Read a memfd. This moves the shared file offset, which the trainer watches."""
    with os.fdopen(file, "rb") as stream:
        return stream.read()


def main(options: dict[str, Any]) -> None:
    """Load modules, drop privileges, verify the confinement, report it, then serve."""
    control = socket.socket(fileno=options["control"])
    try:
        os.chdir("/")
        modules.load(options["path"], options["preload"])
        sys.set_int_max_str_digits(0)  # so that integers of any size can be sent
        judge.inspect_remotely()
        solver.description(types.FunctionType)  # remembered: nearly every program has functions
        random.seed(0)  # the same numbers in every program
        # otherwise a collection in a child would write to every page and so copy it; collections
        # during the imports would find nearly nothing
        gc.freeze()
        gc.enable()
        # if memory runs out, programs should die first; children inherit this
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        zygote = Zygote(options["layers"])
        zygote.prepare()
        confine.verify_confinement(lambda body: zygote.fork(body, 0), zygote.confine)
    except (OSError, ImportError) as error:
        sys.exit(" ".join(str(error).split()))
    control.send(json.dumps({"active": zygote.layers, "missing": zygote.missing}).encode())
    zygote.serve(control, options["user"])
