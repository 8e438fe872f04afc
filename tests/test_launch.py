"""The documented commands, started as a user would: torchrun, accelerate launch, gac."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gac.config import save

from .tiny import metrics, tiny_config

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]


def start(launcher: list[str], *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "localhost",
    }  # fmt: skip
    return subprocess.Popen(
        [*launcher, *arguments], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def written(task, tmp_path, name, **changes) -> Path:
    made = tiny_config(task, tmp_path / name, parallel={"mode": "fsdp", "timeout": 60}, **changes)
    save(made, tmp_path / f"{name}.yaml")
    return tmp_path / f"{name}.yaml"


def worker_of_rank(job: subprocess.Popen[str], rank: int) -> int:
    """Process id of a rank, among the launcher's children."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for pid in children:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(pid)
    raise AssertionError(f"no rank {rank} among {children}")


def wait_for(path: Path, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0]
        time.sleep(0.01)


def test_torchrun_restarts_after_a_killed_rank_and_repeats_nothing(task, tmp_path):
    settings = {"steps": 16, "checkpoint_every": 2}
    straight, killed = (written(task, tmp_path, name, **settings) for name in "ab")
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    run = ["-m", "gac.cli", "train"]
    job = start(TORCHRUN, *port, *run, str(straight))
    assert job.wait(180) == 0, job.communicate()[0]
    job = start(TORCHRUN, *port, "--max-restarts", "1", *run, str(killed))
    wait_for(tmp_path / "b" / "checkpoints" / "step-00000004", job)
    os.kill(worker_of_rank(job, 1), signal.SIGKILL)
    output = job.communicate(timeout=180)[0]
    assert job.returncode == 0, output
    assert metrics(tmp_path / "b") == metrics(tmp_path / "a")
    assert "resumed from" in output


def test_without_restarts_the_job_ends_and_names_the_rank(task, tmp_path):
    made = written(task, tmp_path, "run", steps=2000, eval={})
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    job = start(TORCHRUN, *port, "-m", "gac.cli", "train", str(made))
    wait_for(tmp_path / "run" / "checkpoints" / "step-00000004", job)
    os.kill(worker_of_rank(job, 1), signal.SIGKILL)
    started = time.monotonic()
    output = job.communicate(timeout=120)[0]
    assert job.returncode != 0 and time.monotonic() - started < 60  # within parallel.timeout
    assert (
        "(local_rank: 1)" in output or "local_rank: 1 (pid" in output or "rank 1 is gone" in output
    )


def test_accelerate_launch_export_and_replay(task, tmp_path):
    made = written(task, tmp_path, "run", steps=2)
    script = ["--multi_gpu", "--main_process_port", "0", "--module", "gac.cli"]
    job = start(ACCELERATE, *script, "train", str(made))
    output = job.communicate(timeout=180)[0]
    assert job.returncode == 0, output
    record = json.loads(
        (tmp_path / "run" / "checkpoints" / "step-00000002" / "progress.json").read_text()
    )
    assert record["content"]["ranks"] == 2  # not two unrelated processes
    files = {p.name for p in (tmp_path / "run" / "checkpoints" / "step-00000002").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp"} <= files  # each wrote its shards

    gac = [sys.executable, "-m", "gac.cli"]
    job = start(gac, "export", str(tmp_path / "run"), str(tmp_path / "plain"))
    assert job.wait(120) == 0, job.communicate()[0]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    job = start(gac, "replay", str(tmp_path / "run"))
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 2 and "holds no kept step: give a folder of RUN/replay" in output
