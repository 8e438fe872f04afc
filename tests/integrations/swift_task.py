"""Run one rank of ms-swift's own rlhf command on a CPU, and record what it computes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from swift.pipelines import rlhf_main
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers.trainer_factory import TrainerFactory
from transformers import TrainerCallback

from gac.integrations import swift as ours
from tests.integrations import tiny

PLUGIN = str(Path(__file__).with_name("swift_plugin.py"))
made: list[Any] = []


class Watch(TrainerCallback):
    """Keeps the gradient of each optimiser step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        named = known["model"].named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})


class Recording:
    """Mixin that records a trainer, its inputs and its gradients."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.watch, self.seen, self.shown = Watch(), [], []
        self.add_callback(self.watch)
        made.append(self)

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        inputs = {k: model_inputs[k].clone() for k in ("input_ids", "attention_mask")}
        self.seen.append(
            {
                **inputs,
                "mask": grpo_batch.completion_mask.clone(),
                "advantages": grpo_batch.advantages.clone(),
            }
        )
        return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)


class Ours(Recording, ours.GACGRPOTrainer):
    def _demo_loss(self, model: Any) -> torch.Tensor:
        self.shown.append(self._drawn)
        return super()._demo_loss(model)


class Theirs(Recording, GRPOTrainer):
    pass


def write(folder: Path) -> None:
    """Write the model, the prompts and the demonstrations."""
    tiny.write_model(folder / "model")
    rows = tiny.demonstrations()
    user = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    demos = [
        [*turns, {"role": "assistant", "content": row["completion"]}]
        for turns, row in zip(user, rows, strict=True)
    ]
    for name, chats in (("prompts", user * 3), ("demos", demos)):
        lines = [json.dumps({"messages": turns}) for turns in chats]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def train(folder: str, out: str, kind: type, *options: str, demos: str = "demos.jsonl") -> Any:
    """Run swift's command once and return the trainer. demos: name of the demonstration file; ""
    for none.
    """
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{kind.__name__}"
    ours_only = [
        "--chord_sft_dataset",
        f"{folder}/{demos}",
        "--chord_sft_per_device_train_batch_size",
        "2",
    ]
    rlhf_main(
        [
            "--rlhf_type",
            "grpo",
            "--model",
            f"{folder}/model",
            "--model_type",
            "qwen2",
            "--template",
            "digits",
            "--dataset",
            f"{folder}/prompts.jsonl",
            "--reward_funcs",
            "digits",
            "--external_plugins",
            PLUGIN,
            "--output_dir",
            out,
            "--add_version",
            "false",
            "--tuner_type",
            "full",
            "--torch_dtype",
            "float32",
            "--per_device_train_batch_size",
            "4",
            "--num_generations",
            "4",
            "--max_completion_length",
            "6",
            "--learning_rate",
            "1e-3",
            "--max_grad_norm",
            "0",
            "--report_to",
            "none",
            "--use_cpu",
            "true",
            "--seed",
            "3",
            "--split_dataset_ratio",
            "0",
            "--logging_steps",
            "1",
            "--use_vllm",
            "false",
            "--gradient_checkpointing",
            "false",
            "--dataloader_num_workers",
            "0",
            "--load_args",
            "false",
            "--check_model",
            "false",
            "--dataset_num_proc",
            "1",
            "--temperature",
            "0.7",
            "--save_strategy",
            "no",
            *(ours_only if demos else []),
            *options,
        ]
    )
    return made[-1]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def column(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def main(folder: str, out: str, parts: str, *options: str) -> None:
    """One rank: swift's own trainer, ours with a constant mu, and ours with the controller,
    uninterrupted and resumed.
    """
    accumulate = ["--gradient_accumulation_steps", parts, *options]
    own = train(folder, f"{out}/own", Theirs, "--max_steps", "1", *accumulate, demos="")
    os.environ[ours.OPTIONS] = '{"name": "constant", "mu": 0.3}'
    constant = train(folder, f"{out}/constant", Ours, "--max_steps", "1", *accumulate)
    os.environ[ours.OPTIONS] = '{"name": "gac", "update_every": 2}'
    saving = [
        "--max_steps",
        "4",
        "--save_strategy",
        "steps",
        "--save_steps",
        "2",
        "--beta",
        "1e-30",
        *accumulate,
    ]
    whole = train(folder, f"{out}/whole", Ours, *saving)
    half = f"{out}/whole/checkpoint-2"
    again = train(folder, f"{out}/again", Ours, *saving, "--resume_from_checkpoint", half)
    rank = int(os.environ["RANK"])
    dist.barrier()
    (Path(half) / "gac.json").unlink(missing_ok=True)
    dist.barrier()
    refusal = ""
    try:
        train(folder, f"{out}/lost", Ours, *saving, "--resume_from_checkpoint", half)
    except FileNotFoundError as error:
        refusal = str(error)
    torch.save(
        {
            "own": own.watch.gradients[0],
            "constant": constant.watch.gradients[0],
            "shown": constant.shown[0],
            "seen": constant.seen,
            "mu": column(whole, "gac/mu"),
            "again_mu": column(again, "gac/mu"),
            "next_mu": (whole.mixer.mu, again.mixer.mu),
            "log": whole.state.log_history[0],
            "weights": weights(whole),
            "again": weights(again),
            "refusal": refusal,
        },
        Path(out) / f"rank{rank}.pt",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
