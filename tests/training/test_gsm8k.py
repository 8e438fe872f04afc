"""examples/gsm8k.yaml end to end on the real dataset, with a model small enough for a CPU."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

from gac.config import load
from gac.train_config import TrainConfig
from gac.training.trainer import train
from tests.tiny import metrics, write_bpe_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k.yaml"


def test_two_steps_on_real_rows(data_dir, tmp_path, monkeypatch):
    source = data_dir / "gsm8k_train.jsonl.gz"
    monkeypatch.setenv("GAC_DATA", str(data_dir))
    with gzip.open(source, "rt") as file:
        rows = [json.loads(line) for _, line in zip(range(500), file, strict=False)]
    write_bpe_model(tmp_path / "model", [r["prompt"] + r["solution"] for r in rows])
    config = load(
        TrainConfig,
        EXAMPLE,
        [
            f"out={tmp_path / 'run'}",
            f"model.path={tmp_path / 'model'}",
            "model.random_init=true",
            "model.dtype=float32",
            "steps=2",
            "rollouts.num_prompts=2",
            "rollouts.num_generations=2",
            "rollouts.max_completion_length=12",
            "demo_batch_size=4",
            "eval.data.limit=2",
            "eval.max_completion_length=8",
            "data.limit=200",
        ],
    )
    out = train(config)
    metric_rows = metrics(out)
    assert len(metric_rows) == 2 and all(math.isfinite(r["grad_norm"]) for r in metric_rows)
    assert metric_rows[0]["demo_loss"] > 0 and metric_rows[0]["sft_variance"] > 0
    assert (out / "model" / "model.safetensors").exists()
