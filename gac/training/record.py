"""The run's written record: one JSON object per line, cut back to the checkpoint on resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from gac.errors import RunError


class Logbook:
    """An append-only file of JSON lines, each with a "step"."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        """Write one line; nan and infinite values become null, which every JSON reader takes."""
        line = json.dumps({k: _plain(v) for k, v in row.items()}, allow_nan=False)
        try:
            with self.path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written ({error.strerror}): mend that and give the same "
                "command again; the run goes on from its last checkpoint"
            ) from error

    def cut(self, step: int) -> None:
        """Drop lines of steps after `step`, and a line torn by a kill."""
        if not self.path.exists():
            return
        kept = [row for row in self.read() if row["step"] <= step]
        aside = self.path.with_suffix(".cut")
        aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
        aside.rename(self.path)

    def read(self) -> list[dict[str, Any]]:
        """All complete lines."""
        rows = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break  # only the last line of a killed run can be torn
        return rows


class Record:
    """What a run writes as it goes: metrics.jsonl, eval.jsonl and accelerate's trackers.

    Every rank calls it; the main process writes.
    """

    def __init__(self, out: Path, accelerator: Accelerator) -> None:
        self.metrics, self.evals = Logbook(out / "metrics.jsonl"), Logbook(out / "eval.jsonl")
        self.accelerator = accelerator

    def cut(self, step: int | None) -> None:
        """Go on from the checkpoint of `step`; None: from nothing, whatever a kill left behind."""
        if self.accelerator.is_main_process:
            for book in (self.metrics, self.evals):
                book.cut(-1 if step is None else step)

    def step(self, row: dict[str, Any]) -> None:
        """The metrics of an optimiser step."""
        if self.accelerator.is_main_process:
            self.metrics.append(row)
        numbers = {k: v for k, v in row.items() if v is not None and k != "step"}
        self.accelerator.log(numbers, step=row["step"])

    def evaluation(self, row: dict[str, Any]) -> None:
        """An evaluation; step 0 is before the first optimiser step."""
        if self.accelerator.is_main_process:
            self.evals.append(row)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
