"""The documented commands, started as a user would: torchrun, accelerate launch, gac."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gac import cli
from gac.config import load, save
from gac.train_config import TrainConfig
from gac.training.trainer import train
from tests import ranks
from tests.tiny import metrics, tiny_config

pytestmark = [pytest.mark.dist, pytest.mark.slow(reason="launchers start interpreters")]
ROOT = Path(__file__).resolve().parents[2]
ACCELERATE = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--num_processes=2",
    "--multi_gpu",
    "--main_process_port=0",
    "--module",
    "gac.cli",
]
RENDEZVOUS = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def torchrun(*options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *RENDEZVOUS]
    return [*launcher, *options, "-m", "gac.cli"]


def run_job(launcher: list[str], config: Path, **variables: str) -> tuple[int, str]:
    """Run `gac train` under a launcher; return its exit code and output."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "localhost",
        **variables,
    }
    job = subprocess.Popen(
        [*launcher, "train", str(config)],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output = job.communicate(timeout=180)[0]
    finally:
        job.terminate()  # launchers terminate their ranks
    return job.returncode, output


def write_config(task, tmp_path, name, **changes) -> Path:
    path, parallel = tmp_path / f"{name}.yaml", {"mode": "fsdp", "timeout": 60}
    save(tiny_config(task, tmp_path / name, parallel=parallel, **changes), path)
    return path


@pytest.mark.full(reason="starts seven interpreters; tests/faults/test_resume.py kills ranks too")
def test_torchrun_restarts_after_a_killed_rank_with_the_same_metrics(task, tmp_path):
    settings = {"steps": 8, "checkpoint_every": 2, "reward": "tests.kills:reward"}
    uninterrupted, killed = (write_config(task, tmp_path, name, **settings) for name in "ab")
    ranks.run(train, load(TrainConfig, uninterrupted), ranks=2)
    kill_at = tmp_path / "b" / "checkpoints" / "step-00000004"
    code, output = run_job(torchrun("--max-restarts", "1"), killed, KILL_AT=str(kill_at))
    assert code == 0, output
    assert metrics(tmp_path / "b") == metrics(tmp_path / "a")
    assert "resumed from" in output
    assert re.search(r"local_rank: 1\b|rank 1 is not responding", output)


@pytest.mark.full(reason="starts three more interpreters, as torchrun does")
def test_accelerate_launch_export_and_replay(task, tmp_path, capsys):
    code, output = run_job(ACCELERATE, write_config(task, tmp_path, "run", steps=2))
    assert code == 0, output
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    record = json.loads((checkpoint / "progress.json").read_text())
    assert record["content"]["ranks"] == 2  # not two unrelated processes
    # each wrote its shards
    assert {"__0_0.distcp", "__1_0.distcp"} <= {p.name for p in checkpoint.iterdir()}

    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "plain")]) == cli.OK
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert cli.main(["replay", str(tmp_path / "run")]) == cli.USAGE
    assert re.search("no saved step: .*RUN/replay", capsys.readouterr().err)


def test_the_slurm_script_starts_a_valid_command(task, tmp_path, capsys):
    """`srun` and `scontrol` are replaced by programs that print; `gac check` reads the command."""
    script = ROOT / "examples" / "slurm.sh"
    for name, line in (("srun", 'echo "$@"'), ("scontrol", "echo node-a; echo node-b")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    config = tmp_path / "run.yaml"
    save(tiny_config(task, tmp_path / "run"), config)
    command = ["bash", script, config, "--set", "steps=3"]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert "--rdzv-endpoint=node-a:29500" in printed
    assert "--nnodes=2" in printed
    assert cli.main(["check", *printed[printed.index("train") + 1 :]]) == 0
    assert "steps: 3, each with" in capsys.readouterr().out
