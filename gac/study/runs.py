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
from gac.demo.run import exit_with_parent
from gac.faults.preflight import MAY_CHANGE_ON_RESUME
from gac.training.run_config import TrainConfig, upgrade_config

SPAWN = multiprocessing.get_context("spawn")


def run_all(
    configs: Sequence[TrainConfig],
    jobs: int = 1,
    discard: bool = False,
    log: Callable[[str], None] = print,
) -> dict[str, str]:
    """Train the unfinished runs in order, `jobs` at a time.

    discard: delete the checkpoints of a run as soon as it is finished.
    log: called with one line per finished or failed run.

    Returns folder -> reason for the failed runs, which are retried the next time. Raises
    ConfigError if a folder contains a finished run with another configuration.
    """
    pending = [config for config in configs if result(config) is None]
    threads = max(len(os.sched_getaffinity(0)) // jobs, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # workers inherit it
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    workers = [_Worker() for _ in range(min(jobs, len(pending)))]
    failed: dict[str, str] = {}
    started, total = time.perf_counter(), len(pending)
    try:
        idle, done = list(workers), 0
        while pending or len(idle) < len(workers):
            while pending and idle:
                idle.pop().start(pending.pop(0), discard)
            busy = {worker.pipe: worker for worker in workers if worker not in idle}
            for pipe in wait(list(busy)):
                worker = next(w for p, w in busy.items() if p is pipe)
                config, fault = worker.finish()
                done += 1
                spent = f"{done} of {total}, {time.perf_counter() - started:.0f} s"
                log(f"{config.out}: {fault or 'done'} ({spent})")
                if fault:
                    failed[config.out] = fault
                    worker.close()  # its process may be in a bad state
                    new_worker = _Worker()
                    workers[workers.index(worker)] = worker = new_worker
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
        saved = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    now, then = _settings(dump(config)), _settings(upgrade_config(saved["config"]))
    changed = [key for key in now | then if now.get(key) != then.get(key)]
    if changed:
        raise ConfigError(
            f"{config.out}: contains a finished run with a different {', '.join(changed)}; choose "
            "another `out` or delete that folder"
        )
    return saved


def _settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that determine a run's result, as plain JSON types."""
    ignored = MAY_CHANGE_ON_RESUME - {"steps", "eval"}
    return json.loads(json.dumps({k: v for k, v in plain.items() if k not in ignored}))


class _Worker:
    """A process that trains several runs in sequence, because starting a process takes seconds."""

    def __init__(self) -> None:
        self.pipe, child_pipe = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(child_pipe,))
        self.process.start()
        child_pipe.close()  # so that recv() raises EOFError when the process exits
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
            fault = f"its process exited with code {self.process.exitcode}"
        log = f"; see {Path(self.config.out) / 'log.txt'}" if fault else ""
        return self.config, fault and f"failed: {fault}{log}"

    def close(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection) -> None:
    """Worker loop: train each run received on the pipe, and send the reason if one fails."""
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    while True:
        try:
            plain, discard = pipe.recv()
        except EOFError:
            return
        try:
            _train(load(TrainConfig, plain), discard)
            pipe.send(None)
        except BaseException as error:  # whatever the error, the other runs must continue
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
    partial.write_text(json.dumps({"config": _settings(dump(config)), **_summary(config)}) + "\n")
    partial.replace(out / "result.json")
    if discard:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    sys.stdout.flush()


def _summary(config: TrainConfig) -> dict[str, Any]:
    """The result of the finished run in `config.out`, without its configuration."""
    out = Path(config.out)
    rows = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    if config.method.keeps_best:  # the initial model does not count
        final = max((row for row in rows if row["step"] > 0), key=lambda row: row["accuracy"])
    else:
        final = rows[-1]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return {"final": final, "seconds": sum(json.loads(line)["seconds"] for line in lines)}
