"""ms-swift's own rlhf command with our plugin: gradients, ranks, resuming, unsupported options."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("swift")

from gac.demo import task
from gac.rows import Row
from tests.integrations import plain
from tests.integrations.launch import check_example_learns, launch

TOLERANCE = 3e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integrations import swift_task

    folder = tmp_path_factory.mktemp("files")
    swift_task.write(folder)
    return folder


def demo_rows(rows: list[dict[str, Any]]) -> list[Row]:
    starts = [next(i for i, label in enumerate(row["labels"]) if label != -100) for row in rows]
    return [
        Row(tuple(row["input_ids"]), start, True) for row, start in zip(rows, starts, strict=True)
    ]


def rollout_term(model: Any, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """GRPO's on-policy term: the mean over sequences of their token means."""
    total, count = torch.zeros(()), 0
    for batch in batches:
        logps = plain.logprobs(model, batch["input_ids"], batch["attention_mask"], 0.7)
        mask = batch["mask"].float()
        logps = logps[:, -mask.shape[1] :]
        advantages = batch["advantages"].reshape(len(mask), -1)
        total = total - ((advantages * logps * mask).sum(1) / mask.sum(1)).sum()
        count += len(mask)
    return total / count


@pytest.mark.parametrize(("ranks", "accumulation_steps"), [(1, 1), (1, 2), (2, 2)])
def test_step_gradient_matches_plain_torch(
    folder: Path, tmp_path: Path, ranks: int, accumulation_steps: int
):
    arguments = (str(folder), str(tmp_path), str(accumulation_steps))
    launch("tests.integrations.swift_task", *arguments, ranks=ranks, timeout=400)
    results = [torch.load(tmp_path / f"rank{r}.pt", weights_only=False) for r in range(ranks)]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    rows = demo_rows(results[0]["demos"])
    assert len(rows) == 2 * ranks * accumulation_steps
    assert {row.ids[-1] for row in rows} == {task.make_tokenizer().eos_token_id}
    demo_grads = plain.gradient(model, plain.demo_term(model, rows, weight="one"))
    batches = [batch for rank in results for batch in rank["micro_batches"]]
    rollout_grads = plain.gradient(model, rollout_term(model, batches))
    for rank in results:
        mixed = {n: rank["constant"][n] for n in demo_grads}
        expected = {n: 0.7 * rollout_grads[n] + 0.3 * g for n, g in demo_grads.items()}
        expected_from_swift = {n: 0.7 * rank["grpo"][n] + 0.3 * g for n, g in demo_grads.items()}
        assert plain.relative_error(mixed, expected) < TOLERANCE
        assert plain.relative_error(mixed, expected_from_swift) < TOLERANCE
        assert rank["mu"] == results[0]["mu"]
        assert rank["next_mu"][0] == rank["next_mu"][1] == results[0]["next_mu"][0]
        assert re.search(r"gac\.json.*saved without a controller", rank["error_message"])
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(rank["resumed"][name], weight, rtol=0, atol=1e-7)
    assert len(results[0]["mu"]) == 4
    assert results[0]["resumed_mu"] == results[0]["mu"]
    log = results[0]["log"]
    assert {"gac/demo_loss", "gac/alpha", "gac/kl", "gac/sft_variance"} <= set(log)
    assert "gac/entropy" not in log  # swift did not compute it


def test_unsupported_options_are_rejected(folder: Path, tmp_path: Path, monkeypatch: Any):
    from gac.integrations import swift as gac_swift
    from tests.integrations import swift_task

    def assert_rejected(message: str, *options: str, demos: str = "demos.jsonl") -> None:
        monkeypatch.setenv("RANK", "-1")
        options = ("--max_steps", "1", *options)
        trainer_class = swift_task.RecordingGACTrainer
        with pytest.raises(ValueError, match=message):
            swift_task.train(str(folder), str(tmp_path), trainer_class, *options, demos=demos)

    assert_rejected("chord_sft_dataset is empty", demos="")
    without_batch = ["--chord_sft_dataset", f"{folder}/demos.jsonl"]
    assert_rejected("train_batch_size is not set: set it to", *without_batch, demos="")
    unanswered = {"messages": [{"role": "user", "content": "1"}]}
    (folder / "unanswered.jsonl").write_text(json.dumps(unanswered) + "\n")
    message = r"chord_sft_dataset\[0\] has no completion tokens: remove the row"
    assert_rejected(message, demos="unanswered.jsonl")
    trainer = swift_task.trainers[-1]
    gac_swift.refuse("swift", gac_swift._unsupported_options(trainer))
    for owner, name, value in (
        (trainer, "is_multimodal", True),
        (trainer.args, "use_liger_kernel", True),
        (trainer.template, "padding_free", True),
        (trainer.template, "sequence_parallel_size", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            option = "model" if owner is trainer else name
            with pytest.raises(ValueError, match=f"swift does not support {option}: "):
                gac_swift.refuse("swift", gac_swift._unsupported_options(trainer))
    assert_rejected("loss_scale.*: use .*default", "--loss_scale", "hermes")
    for name in ("luffy", "gac-gated"):
        monkeypatch.setenv("GAC_METHOD", f'"{name}"')
        assert_rejected(f"controller={name} needs .*use a .* gac")


def test_the_example_learns():
    check_example_learns("swift_gac")
