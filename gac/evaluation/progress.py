"""Finished batches of an evaluation: kept in files until the task is complete, and its progress.

OUT/unfinished/<task>-<run>-<rank>.jsonl    one line per batch of this process

A batch is identified by its first prompt and has its own seed, so the answers do not depend on
which run or process has generated them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gac.collectives import gather, rank, run_on_all_ranks

logger = logging.getLogger(__name__)
FOLDER = "unfinished"
INTERVAL = 30.0  # seconds between two lines of progress


class Progress:
    """The finished batches of one task. Create it on every rank.

    Args:
        out: the folder of the results.
        name: the task.
        setting: everything that the answers depend on; batches of other settings are ignored.
    """

    def __init__(self, out: Path, name: str, setting: Mapping[str, Any]) -> None:
        self.name = name
        self.folder = out / FOLDER
        self.key = f"{zlib.crc32(json.dumps([name, setting], sort_keys=True).encode()):08x}"
        self.batches: dict[int, list[list[Any]]] = {}
        """The answers of each batch that an earlier run has finished, by its first prompt."""
        self.counts: Counter[str] = Counter()
        """Events of the reward in the earlier runs."""
        self.seconds = 0.0
        """Duration of the earlier runs, up to their last finished batch."""
        # only one rank reads, because the others may already be writing
        lines = gather(run_on_all_ranks(lambda: [] if rank() else self._read()))[0]
        elapsed: dict[str, float] = {}
        for line in lines:
            self.batches[line["first"]] = line["answers"]
            self.counts.update(line["counts"])
            elapsed[line["run"]] = max(line["seconds"], elapsed.get(line["run"], 0.0))
        self.seconds = sum(elapsed.values())
        self._run = gather(secrets.token_hex(4))[0]
        self._file = self.folder / f"{self.key}-{self._run}-{rank()}.jsonl"
        self._started = self._shown = time.perf_counter()

    def _read(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob(f"{self.key}-*.jsonl")):
            for text in path.read_text().splitlines():
                try:
                    lines.append(json.loads(text))
                except ValueError:  # the run was killed while it wrote this line, its last
                    break
        return lines

    def start(self, prompts: int, done: int) -> None:
        """Log what is left to do, on rank 0."""
        if rank() == 0 and done:
            logger.info("%s: continuing after %d of %d prompts", self.name, done, prompts)

    def add(self, first: int, answers: Sequence[Sequence[Any]], counts: Mapping[str, int]) -> None:
        """Keep a finished batch, also if the machine fails.

        Args:
            first: the number of its first prompt.
            answers: its answers, as plain JSON types.
            counts: events of the reward in this batch.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        line = {"first": first, "answers": answers, "counts": dict(counts), "run": self._run}
        line["seconds"] = time.perf_counter() - self._started
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def show(self, finished: int, own: int, done: int, prompts: int) -> None:
        """Log the progress and the time left, on rank 0, at most every `INTERVAL` seconds.

        Args:
            finished, own: finished batches and all batches of this process in this run.
            done, prompts: finished prompts, estimated for the other processes, and all prompts.
        """
        now = time.perf_counter()
        if rank() or finished == own or (finished > 1 and now - self._shown < INTERVAL):
            return
        self._shown, passed = now, now - self._started
        left = passed / finished * (own - finished)
        logger.info(
            "%s: %d of %d prompts in %s, about %s left",
            self.name,
            done,
            prompts,
            _duration(passed),
            _duration(left),
        )

    def close(self) -> None:
        """Delete the task's files: its results have been saved."""
        if rank() == 0:
            for path in self.folder.glob(f"{self.key}-*.jsonl"):
                path.unlink()
            with contextlib.suppress(OSError):  # another task is unfinished
                self.folder.rmdir()


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
