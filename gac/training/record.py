"""The logs of a run: one JSON object per line, truncated to the checkpoint on resume."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from gac.config import dump
from gac.errors import RunError
from gac.evaluation.table import percent, percent_interval
from gac.rollouts.config import RolloutConfig
from gac.train_config import TrainConfig

logger = logging.getLogger(__name__)


class Logbook:
    """An append-only JSON-lines file; every line has a "step"."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        """Append one line; NaN and infinite values become null, because they are not valid JSON."""
        line = json.dumps({k: _plain(v) for k, v in row.items()}, allow_nan=False)
        try:
            with self.path.open("a+b") as file:
                # a full disk or a kill may have left an incomplete line
                file.seek(max(file.tell() - 1, 0))
                torn = file.read(1) not in (b"", b"\n")
                file.write(b"\n" * torn + line.encode() + b"\n")
        except OSError as error:
            raise RunError(
                f"could not write {self.path} ({error.strerror}): fix this and rerun the command "
                "to resume from the last checkpoint"
            ) from error

    def truncate(self, step: int) -> None:
        """Drop the lines after `step`, and incomplete lines left by a kill or a full disk."""
        if not self.path.exists():
            return
        kept = [row for row in self.read() if row["step"] <= step]
        temporary = self.path.with_suffix(".truncated")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        temporary.rename(self.path)

    def read(self) -> list[dict[str, Any]]:
        """Read all complete lines."""
        rows = []
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # an incomplete line
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict) and "step" in row]


class Record:
    """Logs of a run: metrics.jsonl, eval.jsonl and accelerate's trackers.

    Call it on every rank; only the main process writes files.
    """

    def __init__(self, out: Path, accelerator: Accelerator) -> None:
        self.metrics, self.evals = Logbook(out / "metrics.jsonl"), Logbook(out / "eval.jsonl")
        self.texts = Logbook(out / "samples.jsonl")
        self.accelerator = accelerator

    def truncate(self, step: int | None) -> None:
        """Truncate the logs to the checkpoint of `step`; None clears them for a fresh run."""
        if self.accelerator.is_main_process:
            for book in (self.metrics, self.evals, self.texts):
                book.truncate(-1 if step is None else step)

    def start_trackers(self, config: TrainConfig, new: bool) -> None:
        """Start the trackers of `report_to`; a resumed run continues its W&B run."""
        file = self.metrics.path.with_name("tracker_id")
        if self.accelerator.is_main_process and (new or not file.exists()):
            file.write_text(secrets.token_hex(8))
        name = config.run_name or self.metrics.path.parent.name
        options: dict[str, dict[str, Any]] = {}
        if "wandb" in config.report_to and self.accelerator.is_main_process:
            options["wandb"] = {"name": name, "id": file.read_text(), "resume": "allow"}
        flat = {*config.report_to} - {"wandb", "trackio"}  # the others expect no nested values
        values = {k: json.dumps(v) if flat else v for k, v in dump(config).items()}
        self.accelerator.init_trackers(config.project, values, options)

    def step(self, row: dict[str, Any]) -> None:
        """Log the metrics of an optimizer step."""
        if self.accelerator.is_main_process:
            self.metrics.append(row)
        numbers = {k: v for k, v in row.items() if v is not None and k != "step"}
        self.accelerator.log(numbers, step=row["step"])

    def samples(self, step: int, prompts: list[dict[str, Any]], config: RolloutConfig) -> None:
        """Log a few prompts with their completions and rewards, for people to read."""
        if not (self.accelerator.is_main_process and config.log_samples_every and prompts):
            return
        self.texts.append({"step": step, "prompts": prompts})
        if config.print_samples:
            for prompt in prompts:
                completions = [f"  [{c['reward']}] {c['text']}" for c in prompt["completions"]]
                logger.info("step %d: %s\n%s", step, prompt["prompt"], "\n".join(completions))

    def evaluation(self, row: dict[str, Any]) -> None:
        """Log an evaluation; step 0 is before the first optimizer step."""
        if self.accelerator.is_main_process:
            self.evals.append(row)
            if row.get("accuracy") is not None:
                ends = f" {percent_interval(row['ci95'])}" if row.get("ci95") else ""
                accuracy = f"{percent(row['accuracy'])}%{ends}"
                logger.info(
                    "step %d: accuracy %s, %d prompts", row["step"], accuracy, row.get("prompts", 0)
                )
        numbers = {f"eval/{k}": v for k, v in row.items() if isinstance(v, int | float)}
        self.accelerator.log(numbers, step=row["step"])


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(bar: tqdm, row: dict[str, Any]) -> None:
    """Show a step's metrics that fit next to the bar; without a terminal, a line at times."""
    names = {"reward": "reward_mean", "demo": "demo_loss", "KL": "kl", "mu": "mu"}
    values = {name: row[k] for name, k in names.items()}
    texts = [f"{k}={v:.3g}" for k, v in values.items() if v is not None and not math.isnan(v)]
    if bar.disable:
        if row["step"] % max(bar.total // 10, 1) == 0:
            logger.info("step %d of %d: %s", row["step"], bar.total, ", ".join(texts))
        return
    bar.update()
    if rate := bar.format_dict["rate"]:
        texts.append(f"ETA {bar.format_interval((bar.total - bar.n) / rate)}")
    room = shutil.get_terminal_size().columns - len(f"{bar.n}/{bar.total} |{'#' * 10}|  ")
    while len(texts) > 1 and len(", ".join(texts)) > room:
        texts.pop()  # the least important
    bar.set_description_str(", ".join(texts), refresh=False)
