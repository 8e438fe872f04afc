"""Runs several training runs in parallel: finished ones are kept, failed ones are reported."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from gac.config import dump, load, save_text
from gac.errors import ConfigError
from gac.train_config import TrainConfig
from gac.training.startup import MAY_CHANGE_ON_RESUME

STOP_SECONDS = 60.0  # for stopped runs to finish their step and save a checkpoint
WATCH_SECONDS = 2.0  # between two looks at the running runs
PROCESSES = multiprocessing.get_context("forkserver")  # imports torch once for all runs


def run_all(
    configs: Sequence[TrainConfig],
    jobs: int,
    *,
    discard: bool = False,
    report: bool = False,
    log: Callable[[str], None] = print,
    watch: Callable[[], None] | None = None,
) -> dict[str, str]:
    """Train the unfinished runs in order, `jobs` at a time, each in its own process.

    discard: delete the checkpoints of a run as soon as it is finished.
    report: also write each run's own report.
    log: called with one line per finished or failed run.
    watch: called every few seconds while runs are running.

    Returns folder -> reason for the failed runs, which are retried the next time. Raises
    ConfigError if a folder contains a finished run with another configuration.
    """
    pending = [config for config in configs if result(config) is None]
    started, total, done = time.perf_counter(), len(pending), 0
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # inherited by the processes
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)) // jobs or 1)
    start_server(["gac.training.trainer"])
    running: dict[Any, tuple[Any, str]] = {}
    failed: dict[str, str] = {}
    try:
        while pending or running:
            while pending and len(running) < jobs:
                config = pending.pop(0)
                arguments = (dump(config), threads, discard, report)
                process = PROCESSES.Process(target=_train, args=arguments)
                process.start()
                running[process.sentinel] = process, config.out
            ended_runs = wait(list(running), timeout=WATCH_SECONDS if watch else None)
            if watch:
                watch()
            for ended in ended_runs:
                process, out = running.pop(ended)
                done += 1
                if process.exitcode:
                    failed[out] = _fault(Path(out) / "log.txt", process.exitcode)
                spent = f"{done} of {total}, {time.perf_counter() - started:.0f} s"
                log(f"{out}: {failed.get(out, 'done')} ({spent})")
    finally:
        for process, _ in running.values():
            process.terminate()
        if running:
            text = "stopping: each run finishes its step and saves a checkpoint"
            print(text, file=sys.stderr, flush=True)
        deadline = time.monotonic() + STOP_SECONDS
        for process, _ in running.values():
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
    return failed


def start_server(modules: list[str]) -> None:
    """Start the fork server, which imports `modules`, unless it is already running.

    It has a single thread, so that no fork can copy a lock that another thread holds.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # BLAS starts its threads at import
    PROCESSES.set_forkserver_preload(modules)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def result(config: TrainConfig) -> dict[str, Any] | None:
    """Result of a finished run: its last or best evaluation `final`, `seconds` and `tokens`.

    None if the run is not finished. Raises ConfigError if it was run with other settings.
    """
    path = Path(config.out) / "result.json"
    try:
        saved = json.loads(path.read_text())
        now, then = _settings(dump(config)), _settings(saved["config"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: damaged; delete that folder to train again") from error
    changed = [key for key in now | then if now.get(key) != then.get(key)]
    if changed:
        raise ConfigError(
            f"{config.out}: contains a finished run with a different {', '.join(changed)}; choose "
            "another `out` or delete that folder"
        )
    return saved


def _settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that determine a run's result."""
    ignored = MAY_CHANGE_ON_RESUME - {"steps", "eval"}
    return {key: value for key, value in plain.items() if key not in ignored}


def _fault(log: Path, exit_code: int) -> str:
    """Why a run failed: the last line of its log, unless its process was killed."""
    readable = exit_code == 1 and log.exists()  # a process may fail before it opens its log
    lines = log.read_text(errors="replace").split("\n") if readable else []
    reasons = [line for line in lines if line.strip()] or [f"its process exited with {exit_code}"]
    return f"failed: {reasons[-1][:300]}; see {log}"


def _train(plain: Mapping[str, Any], threads: int, discard: bool, report: bool) -> None:
    """Train one run in this process and write result.json; stdout and stderr go to log.txt."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # the parent handles Ctrl-C and a closed terminal: it stops this run, which then saves its state
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    config = load(TrainConfig, plain)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    from gac.training.trainer import train

    try:
        train(config)
    except Exception as error:  # the process that waits for this run reads its log
        traceback.print_exc()
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))  # the log's last line
    if report:
        from gac.report import write_report

        write_report([out], out)
    text = json.dumps({"config": _settings(plain), **_summary(config)}) + "\n"
    save_text(out / "result.json", text)
    if discard:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)


def _exit_with_parent() -> None:
    """Exit as soon as the parent process is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # only called in a child process
    parent.join()
    os._exit(1)


def _summary(config: TrainConfig) -> dict[str, Any]:
    """The result of the finished run in `config.out`, without its configuration."""
    out = Path(config.out)
    rows = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    best = config.method.keeps_best and max(  # the initial model does not count
        (row for row in rows if row["step"] > 0 and row.get("accuracy") is not None),
        key=lambda row: row["accuracy"],
        default=None,
    )
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return {
        "final": best or rows[-1],
        "seconds": sum(json.loads(line)["seconds"] for line in lines),
        "tokens": sum(json.loads(line)["tokens"] for line in lines),
    }
