"""GAC in verl, on a tiny model created on the fly; takes minutes on a CPU.

    python -m examples.verl_gac [STEPS]

The actor is built by verl from its own configuration; the additions for GAC are marked with "gac".
verl's rollout servers need GPUs, so completions are sampled with transformers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import toy, verl_cpu

PROMPTS, COMPLETIONS = 8, 8  # prompts per step, completions per prompt
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"


def options(folder: Path) -> list[str]:
    """The arguments of `python -m verl.trainer.main_ppo` that concern the actor."""
    return [
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS * COMPLETIONS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_kl_loss=true",  # alpha depends on the KL to the reference
        f"{POLICY_LOSS}._target_=gac.integrations.verl.GACPolicyLoss",  # gac
        f"+{POLICY_LOSS}.demo_path={folder}/demos.jsonl",  # gac: prompt and completion
        f"+{POLICY_LOSS}.demo_batch=16",  # gac: demonstrations per optimizer step
    ]


def with_advantages(rollouts: list[toy.Rollout]) -> list[dict[str, Any]]:
    """The rollouts with verl's GRPO advantages, as rows for `verl_cpu.batch`."""
    advantages = verl_cpu.grpo_advantages(
        [row.reward for row in rollouts], [row.group for row in rollouts]
    )
    return [
        {
            "prompt": row.prompt,
            "response": row.response,
            "old": row.logps,
            "ref": row.ref_logps,
            "mask": torch.ones_like(row.response),
            "advantage": torch.full_like(row.logps, advantage),
        }
        for row, advantage in zip(rollouts, advantages, strict=True)
    ]


def run(steps: int, folder: Path) -> list[dict[str, float]]:
    """Train for `steps` optimizer steps and return the logged metrics with the mean reward."""
    toy.write(folder)
    actor = verl_cpu.actor(*options(folder))
    policy = AutoModelForCausalLM.from_pretrained(folder / "model")
    reference = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    size = PROMPTS * COMPLETIONS
    logged = []
    for step in range(steps):
        prompts = toy.prompts(step, PROMPTS)
        rollouts = toy.sample(policy, reference, tokenizer, prompts, COMPLETIONS)
        data = verl_cpu.batch(
            with_advantages(rollouts),
            temperature=1.0,
            global_batch_size=size,
            mini_batch_size=size,
            epochs=1,
        )
        metrics = verl_cpu.step(actor, data)
        toy.copy_weights(policy, actor.engine.module)
        row = {name: values[0] for name, values in metrics.items() if name.startswith("gac/")}
        logged.append({"reward": sum(r.reward for r in rollouts) / size, **row})
    return logged


if __name__ == "__main__":
    verl_cpu.init_single_process()
    with tempfile.TemporaryDirectory() as folder:
        for row in run(int(sys.argv[1]) if len(sys.argv) > 1 else 100, Path(folder)):
            names = ("reward", "gac/mu", "gac/rollout_loss", "gac/demo_loss")
            print(" ".join(f"{name} {row[name]:.3f}" for name in names))
    dist.destroy_process_group()
