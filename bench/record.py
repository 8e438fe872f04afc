"""Saves results as rows of one JSON file per device and day: bench/results/<device>-<date>.json."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from tools.origin import commit

from .settings import RESULTS

PACKAGES = ("torch", "triton", "liger-kernel", "trl", "cut-cross-entropy", "quack-kernels")


class Record:
    """Collects rows while benchmarks run; `save` merges them into the day's file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Add a row: its identifying fields, and measurements such as ms.

        The identifying fields are those in `key`; device is "cpu" or "cuda".
        """
        self.rows.append(row)

    def save(self) -> list[Path]:
        """Save the rows to one file per device and return the paths of these files.

        A row replaces an older row with the same device, work, shape, tokens, case and provider.
        """
        paths = []
        for device in sorted({row["device"] for row in self.rows}):
            name = device_name(device)
            path = RESULTS / f"{slug(name)}-{datetime.date.today()}.json"
            old = json.loads(path.read_text())["rows"] if path.exists() else []
            merged = {key(row): row for row in [*old, *self.rows] if row["device"] == device}
            document = {"device": name, "date": str(datetime.date.today()), **environment(device)}
            RESULTS.mkdir(exist_ok=True, parents=True)
            text = json.dumps({**document, "rows": list(merged.values())}, indent=1) + "\n"
            # never half a file, even if this process is killed
            partial = path.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(path)
            copy_out(path)
            paths.append(path)
        return paths


def copy_out(path: Path) -> None:
    """Copy `path` to the folder in the environment variable OUT, if set."""
    if out := os.environ.get("OUT"):
        Path(out).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, out)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The fields that identify a row."""
    return tuple(
        row.get(name) for name in ("device", "work", "shape", "tokens", "case", "provider")
    )


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()} {torch.get_num_threads()} threads"
    return platform.machine()


def environment(device: str) -> dict[str, Any]:
    """Commit and package versions; on a GPU, driver version and clocks right after the runs."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    info: dict[str, Any] = {"commit": commit(), "versions": versions}
    if device == "cuda":
        info["cuda"] = torch.version.cuda
        query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # missing, or hangs
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
            values = run.stdout.strip().split(", ")
            info["nvidia-smi"] = dict(zip(query.split(","), values, strict=False))
    return info
