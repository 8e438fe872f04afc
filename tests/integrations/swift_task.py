"""Run one rank of ms-swift's own rlhf command on a CPU, and record what it computes."""

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

from gac.integrations import swift as gac_swift
from tests.integrations import tiny
from tests.integrations.recording import GradientRecorder, column, message_of, weights

PLUGIN = str(Path(__file__).with_name("swift_plugin.py"))
trainers: list[Any] = []  # every trainer that was created


class RecordingMixin:
    """Records a trainer, the inputs of its micro-batches and its gradients."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.recorder = GradientRecorder()
        self.micro_batches: list[dict[str, torch.Tensor]] = []
        self.recorded_demos: list[list[dict[str, Any]]] = []  # per micro-batch
        self.add_callback(self.recorder)
        trainers.append(self)

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        tensors = {name: model_inputs[name] for name in ("input_ids", "attention_mask")}
        tensors |= {"mask": grpo_batch.completion_mask, "advantages": grpo_batch.advantages}
        self.micro_batches.append({name: x.clone() for name, x in tensors.items()})
        return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)


class RecordingGACTrainer(RecordingMixin, gac_swift.GACGRPOTrainer):
    def _demo_loss(self, model: Any) -> torch.Tensor:
        self.recorded_demos.append(self._step_demos)
        return super()._demo_loss(model)


class RecordingGRPOTrainer(RecordingMixin, GRPOTrainer):
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


OPTIONS = """
--rlhf_type grpo --model_type qwen2 --template digits --reward_funcs digits
--add_version false --tuner_type full --torch_dtype float32 --per_device_train_batch_size 4
--num_generations 4 --max_completion_length 6 --learning_rate 1e-3 --max_grad_norm 0
--report_to none --use_cpu true --seed 3 --split_dataset_ratio 0 --logging_steps 1
--use_vllm false --gradient_checkpointing false --dataloader_num_workers 0 --load_args false
--check_model false --dataset_num_proc 1 --temperature 0.7 --save_strategy no
"""
SAVING = "--max_steps 4 --save_strategy steps --save_steps 2 --beta 1e-30"


def train(
    folder: str, out: str, trainer_class: type, *options: str, demos: str = "demos.jsonl"
) -> Any:
    """Run swift's command once and return the trainer.

    demos: name of the demonstration file; "" for none.
    """
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{trainer_class.__name__}"
    paths = {"model": f"{folder}/model", "dataset": f"{folder}/prompts.jsonl", "output_dir": out}
    paths["external_plugins"] = PLUGIN
    if demos:
        paths["chord_sft_dataset"] = f"{folder}/{demos}"
        options = ("--chord_sft_per_device_train_batch_size", "2", *options)
    named = [word for name, path in paths.items() for word in (f"--{name}", path)]
    rlhf_main([*named, *OPTIONS.split(), *options])
    return trainers[-1]


def main(folder: str, out: str, accumulation_steps: str, *options: str) -> None:
    """Run one rank: swift's trainer, ours with a constant mu, ours with the controller, resumed."""
    options = ("--gradient_accumulation_steps", accumulation_steps, *options)
    one_step = ("--max_steps", "1", *options)
    grpo = train(folder, f"{out}/grpo", RecordingGRPOTrainer, *one_step, demos="")
    os.environ[gac_swift.METHOD_ENV] = '{"name": "constant", "mu": 0.3}'
    constant = train(folder, f"{out}/constant", RecordingGACTrainer, *one_step)
    os.environ[gac_swift.METHOD_ENV] = '{"name": "gac", "update_every": 2}'
    saving = [*SAVING.split(), *options]
    uninterrupted = train(folder, f"{out}/uninterrupted", RecordingGACTrainer, *saving)
    checkpoint = f"{out}/uninterrupted/checkpoint-2"
    saving += ["--resume_from_checkpoint", checkpoint]
    resumed = train(folder, f"{out}/resumed", RecordingGACTrainer, *saving)
    rank = int(os.environ["RANK"])
    dist.barrier()
    (Path(checkpoint) / "gac.json").unlink(missing_ok=True)
    dist.barrier()
    without_state = (folder, f"{out}/without_state", RecordingGACTrainer, *saving)
    error_message = message_of(FileNotFoundError, train, *without_state)
    torch.save(
        {
            "grpo": grpo.recorder.gradients[0],
            "constant": constant.recorder.gradients[0],
            "demos": constant.recorded_demos[0],
            "micro_batches": constant.micro_batches,
            "mu": column(uninterrupted, "gac/mu"),
            "resumed_mu": column(resumed, "gac/mu"),
            "next_mu": (uninterrupted.mixer.mu, resumed.mixer.mu),
            "log": uninterrupted.state.log_history[0],
            "weights": weights(uninterrupted),
            "resumed": weights(resumed),
            "error_message": error_message,
        },
        Path(out) / f"rank{rank}.pt",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
