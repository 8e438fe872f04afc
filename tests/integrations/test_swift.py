"""ms-swift's own rlhf command with our plugin: gradients, ranks, resuming, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("swift")

from gac.data.rows import Row
from tests.integrations import plain, tiny
from tests.integrations.launch import example, launch

TOLERANCE = 3e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integrations import swift_task

    folder = tmp_path_factory.mktemp("files")
    swift_task.write(folder)
    return folder


def shown(rows: list[dict[str, Any]]) -> list[Row]:
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


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (1, 2), (2, 2)])
def test_a_step_is_that_of_plain_code(folder: Path, tmp_path: Path, ranks: int, parts: int):
    launch(
        "tests.integrations.swift_task",
        str(folder),
        str(tmp_path),
        str(parts),
        ranks=ranks,
        timeout=400,
    )
    found = [torch.load(tmp_path / f"rank{r}.pt", weights_only=False) for r in range(ranks)]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    rows = shown(found[0]["shown"])
    assert len(rows) == 2 * ranks * parts
    words = tiny.tokenizer()
    assert all(row.ids[-1] == words.eos_token_id for row in rows)
    demos = plain.gradient(model, plain.demo_term(model, rows, phi=False))
    batches = [batch for rank in found for batch in rank["seen"]]
    alone = plain.gradient(model, rollout_term(model, batches))
    for rank in found:
        mixed = {n: rank["constant"][n] for n in demos}
        plainly = {n: 0.7 * alone[n] + 0.3 * demos[n] for n in demos}
        theirs = {n: 0.7 * rank["own"][n] + 0.3 * demos[n] for n in demos}
        assert plain.error(mixed, plainly) < TOLERANCE
        assert plain.error(mixed, theirs) < TOLERANCE
        assert rank["mu"] == found[0]["mu"]
        assert rank["next_mu"][0] == rank["next_mu"][1] == found[0]["next_mu"][0]
        assert "saved without a controller" in rank["refusal"]
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(rank["again"][name], weight, rtol=0, atol=1e-7)
    assert len(found[0]["mu"]) == 4
    assert found[0]["again_mu"] == found[0]["mu"]
    log = found[0]["log"]
    assert {"gac/demo_loss", "gac/alpha", "gac/kl", "gac/sft_variance"} <= set(log)
    assert "gac/entropy" not in log  # swift did not compute it


def test_what_is_not_supported_is_refused(folder: Path, tmp_path: Path, monkeypatch: Any):
    from gac.integrations import swift as ours
    from tests.integrations import swift_task

    def refused(message: str, *options: str, demos: str = "demos.jsonl") -> None:
        monkeypatch.setenv("RANK", "-1")
        with pytest.raises(ValueError, match=message):
            swift_task.train(
                str(folder),
                str(tmp_path),
                swift_task.Ours,
                "--max_steps",
                "1",
                *options,
                demos=demos,
            )

    refused("chord_sft_dataset is empty", demos="")
    missing = ["--chord_sft_dataset", f"{folder}/demos.jsonl"]
    refused("chord_sft_per_device_train_batch_size is not set", *missing, demos="")
    unanswered = {"messages": [{"role": "user", "content": "1"}]}
    (folder / "unanswered.jsonl").write_text(json.dumps(unanswered) + "\n")
    message = r"chord_sft_dataset\[0\] has no completion tokens: remove the row"
    refused(message, demos="unanswered.jsonl")
    trainer = swift_task.made[-1]
    ours.refuse("swift", ours._refused(trainer))
    for owner, name, value in (
        (trainer, "is_multimodal", True),
        (trainer.args, "use_liger_kernel", True),
        (trainer.template, "padding_free", True),
        (trainer.template, "sequence_parallel_size", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            option = "model" if owner is trainer else name
            with pytest.raises(ValueError, match=f"swift refuses {option}: "):
                ours.refuse("swift", ours._refused(trainer))
    refused("loss_scale weighs single tokens", "--loss_scale", "hermes")
    for name in ("luffy", "gac-gated", "gac-gated-sketch"):
        monkeypatch.setenv("GAC_METHOD", f'"{name}"')
        refused(f"controller={name}: it needs .*: use gac, chord, constant, guarded or kl-ctrl")


def test_the_example_learns():
    rows = example("swift_gac", 10)
    assert len(rows) == 10
    assert rows[-1]["gac/demo_loss"] < rows[0]["gac/demo_loss"]
    assert rows[-1]["reward"] > rows[0]["reward"]
    assert len({row["gac/mu"] for row in rows}) > 1
