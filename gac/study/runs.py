"""Runs a study in worker processes: finished runs are kept, failed runs are reported."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gac.config import ConfigError, dump, load
from gac.demo.run import die_with_parent
from gac.faults.preflight import HARMLESS
from gac.training.run_config import TrainConfig, restated

SPAWN = multiprocessing.get_context("spawn")


def run_all(
    configs: Sequence[TrainConfig],
    jobs: int = 1,
    discard: bool = False,
    tell: Callable[[str], None] = print,
) -> dict[str, str]:
    """Train the unfinished runs in order, `jobs` at a time.

    discard: delete the checkpoints of a run as soon as it is finished.
    log: called with one line per finished or failed run.

    Returns folder -> reason for the failed runs, which are retried the next time. Raises
    ConfigError if a folder contains a finished run with another configuration.
    """
    waiting = [config for config in configs if result(config) is None]
    threads = max(len(os.sched_getaffinity(0)) // jobs, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # workers inherit it
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    workers = [_Worker() for _ in range(min(jobs, len(waiting)))]
    failed: dict[str, str] = {}
    started, total = time.perf_counter(), len(waiting)
    try:
        idle, done = list(workers), 0
        while waiting or len(idle) < len(workers):
            while waiting and idle:
                idle.pop().start(waiting.pop(0), discard)
            busy = {worker.pipe: worker for worker in workers if worker not in idle}
            for pipe in wait(list(busy)):
                worker = next(w for p, w in busy.items() if p is pipe)
                config, fault = worker.finish()
                done += 1
                spent = f"{done} of {total}, {time.perf_counter() - started:.0f} s"
                tell(f"{config.out}: {fault or 'done'} ({spent})")
                if fault:
                    failed[config.out] = fault
                    worker.close()
                    workers[workers.index(worker)] = worker = (
                        _Worker()
                    )  # the failed worker may be in a bad state
                idle.append(worker)
    finally:
        for worker in workers:
            worker.close()
    return failed


def result(config: TrainConfig) -> dict[str, Any] | None:
    """Result of a finished run: `final`, its last (or best) evaluation, and `seconds` of training.

    None if the run is not finished. Raises ConfigError if it was run with other settings.
    """
    path = Path(config.out) / "result.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    now, then = _settings(dump(config)), _settings(restated(found["config"]))
    other = [key for key in now | then if now.get(key) != then.get(key)]
    if other:
        raise ConfigError(
            f"{config.out}: holds a finished run with another {', '.join(other)}; choose another "
            "`out`, or delete that folder"
        )
    return found


def _settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that determine a run's result, in plain JSON types."""
    free = HARMLESS - {"steps", "eval"}
    return json.loads(json.dumps({k: v for k, v in plain.items() if k not in free}))


class _Worker:
    """A worker process that trains several runs in sequence, because starting a process takes
    seconds.
    """

    def __init__(self) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()  # so that recv() raises EOFError if the worker dies
        self.config: TrainConfig | None = None

    def start(self, config: TrainConfig, discard: bool) -> None:
        self.config = config
        self.pipe.send((dump(config), discard))

    def finish(self) -> tuple[TrainConfig, str | None]:
        """Return the run that has ended and, if it failed, the reason."""
        assert self.config is not None  # only called while busy
        try:
            fault = self.pipe.recv()
        except EOFError:
            self.process.join()
            fault = f"its process died (exit code {self.process.exitcode})"
        where = f"; see {Path(self.config.out) / 'log.txt'}" if fault else ""
        return self.config, fault and f"failed: {fault}{where}"

    def close(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection) -> None:
    """Worker loop: train each run received until the pipe is closed, and report why a run failed."""
    die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent handles Ctrl-C; interrupted runs resume
    while True:
        try:
            plain, discard = pipe.recv()
        except EOFError:
            return
        try:
            _train(load(TrainConfig, plain), discard)
            pipe.send(None)
        except BaseException as error:  # whatever the error, the other runs continue
            text = " ".join(str(error).split())
            pipe.send(f"{type(error).__name__}: {text[:300]}")
            raise  # for the traceback in the run's log


def _train(config: TrainConfig, discard: bool) -> None:
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    from gac.training.trainer import train

    train(config)
    partial = out / "result.partial"
    partial.write_text(json.dumps({"config": _settings(dump(config)), **_outcome(config)}) + "\n")
    partial.replace(out / "result.json")
    if discard:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    sys.stdout.flush()


def _outcome(config: TrainConfig) -> dict[str, Any]:
    out = Path(config.out)
    rows = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    if config.method.keeps_best:  # the initial model does not count
        final = max((row for row in rows if row["step"] > 0), key=lambda row: row["accuracy"])
    else:
        final = rows[-1]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return {"final": final, "seconds": sum(json.loads(line)["seconds"] for line in lines)}
