"""GAC in Trinity-RFT, on a tiny model created on the fly; takes minutes on a CPU.

    python -m examples.trinity_gac [STEPS]

Configuration, sample strategy, advantages and loss use Trinity's own code with verl's worker; the
changes in the configuration are marked with "gac". Trinity's explorer and file buffers need vLLM,
so both buffers are in memory here, and completions are sampled with transformers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from trinity.algorithm import ADVANTAGE_FN, SAMPLE_STRATEGY
from trinity.buffer.buffer_reader import BufferReader
from trinity.common.config import Config, load_config
from trinity.common.config_validator import AlgorithmConfigValidator
from trinity.common.experience import EID, Experience

from examples import toy, trinity_cpu

PROMPTS, COMPLETIONS = 8, 6  # per step, in addition to 16 demonstrations

CONFIG = """
checkpoint_root_dir: {folder}/checkpoints
algorithm:
  algorithm_type: gac.integrations.trinity.GACAlgorithm  # gac: was mix_chord
  sample_strategy_args:
    expert_data_ratio: 0.25
    sft_dataset_name: sft_dataset
  policy_loss_fn_args:
    method: {{name: constant-alarm}}  # gac
    clip_range: 0.2
buffer:
  train_batch_size: 64
  trainer_input:
    experience_buffer: {{storage_type: {module}.Rollouts}}
    auxiliary_buffers:
      sft_dataset:
        storage_type: {module}.Demonstrations
        schema_type: sft
        path: {folder}/demos.jsonl
"""


class Rollouts(BufferReader):
    """Buffer that samples and scores completions on read, with Trinity's GRPO advantages."""

    policy: Any = None  # `run` sets these three before the first read
    reference: Any = None
    tokenizer: Any = None

    def __init__(self, config: Any) -> None:
        self.reads = 0
        self.advantages = ADVANTAGE_FN.get("grpo")()

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Experience]:
        rows = toy.prompts(self.reads, PROMPTS)
        rollouts = toy.sample(self.policy, self.reference, self.tokenizer, rows, COMPLETIONS)
        self.reads += 1
        experiences = [
            Experience(
                eid=EID(task=row.group, run=i),
                tokens=torch.cat([row.prompt, row.response]),
                prompt_length=len(row.prompt),
                logprobs=row.logps,
                reward=row.reward,
                info={"model_version": self.reads, "reference": row.ref_logps},
            )
            for i, row in enumerate(rollouts)
        ]
        return self.advantages.process(experiences)[0]


class Demonstrations(BufferReader):
    """Cycles through the rows of a file with prompt and completion."""

    def __init__(self, config: Any) -> None:
        lines = Path(config.path).read_text().splitlines()
        self.rows = [json.loads(line) for line in lines]
        self.batch_size, self.reads = config.batch_size, 0

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Experience]:
        first = self.reads * self.batch_size
        self.reads += 1
        tokenizer, experiences = Rollouts.tokenizer, []
        for i in range(first, first + self.batch_size):
            row = self.rows[i % len(self.rows)]
            prompt = tokenizer(row["prompt"])["input_ids"]
            completion = tokenizer(row["completion"])["input_ids"]
            tokens = torch.tensor([*prompt, *completion, tokenizer.eos_token_id])
            experiences.append(Experience(tokens=tokens, prompt_length=len(prompt)))
        return experiences


def configuration(folder: Path) -> Config:
    """Load the configuration file with Trinity, which completes and validates it."""
    path = folder / "trinity.yaml"
    path.write_text(CONFIG.format(folder=folder, module=__name__))
    config = load_config(str(path))
    config.checkpoint_job_dir = config.checkpoint_root_dir
    AlgorithmConfigValidator().validate(config)
    return config


def run(steps: int, folder: Path) -> list[dict[str, float]]:
    """Train for `steps` training steps and return the logged metrics with the mean reward."""
    toy.write(folder)
    Rollouts.policy = AutoModelForCausalLM.from_pretrained(folder / "model")
    Rollouts.reference = AutoModelForCausalLM.from_pretrained(folder / "model")
    Rollouts.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = configuration(folder)
    algorithm = config.algorithm
    strategy_class = SAMPLE_STRATEGY.get(algorithm.sample_strategy)
    strategy = strategy_class(config.buffer, **algorithm.sample_strategy_args)
    actor = trinity_cpu.make_worker(str(folder / "model"), algorithm, lr=1e-3)
    logged = []
    for step in range(1, steps + 1):
        rows, _, _ = asyncio.run(strategy.sample(step))
        references = [row.info.get("reference", torch.empty(0)) for row in rows]
        metrics = trinity_cpu.step(actor, trinity_cpu.batch(rows, references, micro=16))
        toy.copy_weights(Rollouts.policy, actor.engine.module)
        row = {name: values[-1] for name, values in metrics.items() if "gac/" in name}
        rewards = [row.reward for row in rows if not row.info["is_expert"]]
        logged.append({"reward": sum(rewards) / len(rewards), **row})
    return logged


if __name__ == "__main__":
    trinity_cpu.init_single_process()
    with tempfile.TemporaryDirectory() as folder:
        for row in run(int(sys.argv[1]) if len(sys.argv) > 1 else 100, Path(folder)):
            names = ("reward", "actor/gac/mu", "actor/gac/rollout_loss", "actor/gac/demo_loss")
            print(" ".join(f"{name} {row[name]:.3f}" for name in names))
    dist.destroy_process_group()
