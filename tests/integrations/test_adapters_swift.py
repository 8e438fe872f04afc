"""The adapter for ms-swift, against stand-ins for the few classes of swift that it extends."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from gac.methods import DEFAULT, METHODS
from gac.rows import Row
from tests.integrations.stand_ins import modules


class HostTrainer:
    """Stand-in for swift's GRPOTrainer; its loss is that of the model's inputs."""

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        return model_inputs["loss"], {"metrics": "of swift"}


class Factory:
    """Stand-in for TrainerFactory."""

    TRAINER_MAPPING: ClassVar[dict[str, str]] = {}


CONTENTS = {
    "swift.rlhf_trainers": {"GRPOTrainer": HostTrainer},
    "swift.trainers.trainer_factory": {"TrainerFactory": Factory},
    "swift.utils": {"to_device": lambda batch, device: batch | {"device": device}},
}


@pytest.fixture
def swift() -> Iterator[Any]:
    with modules(CONTENTS, "gac.integrations.swift") as adapter:
        yield adapter


ROWS: list[dict[str, Any]] = [
    {"input_ids": [3, 4, 5, 6], "labels": [-100, 4, 5, -100]},
    {"input_ids": [7, 8], "labels": [7, 8], "loss_scale": None},
    {"input_ids": [9, 3, 4], "labels": [-100, 3, 4]},
    {"input_ids": [5], "labels": [5]},
    {"input_ids": [5, 6], "labels": [-100, 6], "loss_scale": [0.0, 2.0]},
]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    length = max(len(row["input_ids"]) for row in rows)
    ids, labels = (
        torch.tensor([row[name] + [pad] * (length - len(row[name])) for row in rows])
        for name, pad in (("input_ids", 0), ("labels", -100))
    )
    return {"input_ids": ids, "labels": labels, "attention_mask": ids > 0, "lengths": [1]}


TEMPLATE = SimpleNamespace(padding_free=False, sequence_parallel_size=1, data_collator=collate)


def make(swift: Any, *, rank: int = 0, ranks: int = 1, micro_batches: int = 1) -> Any:
    trainer = swift.GACGRPOTrainer()
    trainer.model = SimpleNamespace(training=True, peft_config=None)
    trainer.chat_template = None
    trainer.template = SimpleNamespace(**vars(TEMPLATE))
    trainer.is_multimodal = trainer.overlong_filter = False
    trainer.chord_sft_dataset = ROWS[:3]
    trainer.args = SimpleNamespace(
        chord_sft_per_device_train_batch_size=2,
        gradient_accumulation_steps=micro_batches,
        gradient_checkpointing=False,
        gradient_checkpointing_kwargs=None,
        torch_compile=False,
        use_liger_kernel=False,
        seed=7,
    )
    trainer.current_gradient_accumulation_steps = micro_batches
    trainer.accelerator = SimpleNamespace(
        num_processes=ranks,
        process_index=rank,
        device="cpu",
        sync_gradients=False,
        state=None,
    )
    return trainer


def test_the_trainer_is_registered(swift: Any) -> None:
    assert Factory.TRAINER_MAPPING == {"grpo": "gac.integrations.swift.GACGRPOTrainer"}


def test_preparing_the_demonstrations(swift: Any, monkeypatch: Any) -> None:
    attached: list[Any] = []
    monkeypatch.setattr(swift, "attach_head", attached.append)
    monkeypatch.setattr(swift, "base_model", lambda trainer: trainer.model)
    monkeypatch.delenv("GAC_METHOD", raising=False)
    trainer = make(swift, ranks=3, micro_batches=5)
    trainer._prepare_chord_dataset()
    assert trainer.chord_sft_iterator is None
    assert attached == [trainer.model]
    mixer = trainer.mixer
    assert (mixer.method, mixer.batch) == (METHODS[DEFAULT](), 3 * 5 * 2)
    assert (mixer._order.n, mixer._order.seed) == (3, 7)
    monkeypatch.setenv("GAC_METHOD", json.dumps({"name": "constant", "mu": 0.25}))
    trainer._prepare_chord_dataset()
    assert trainer.mixer.mu == 0.25
    monkeypatch.setenv("GAC_METHOD", '"gacc"')
    with pytest.raises(ValueError, match="GAC_METHOD"):
        trainer._prepare_chord_dataset()
    for owner, name, value, message in (
        (trainer, "chord_sft_dataset", [], "chord_sft_dataset is empty: set it"),
        (trainer.args, "chord_sft_per_device_train_batch_size", None, "batch_size is not set: set"),
        (trainer, "is_multimodal", True, "gac.integrations.swift does not support model: images"),
        (trainer.args, "use_liger_kernel", True, "does not support use_liger_kernel: Liger's"),
        (trainer.args, "torch_compile", True, "does not support torch_compile: set it to False"),
        (trainer.template, "padding_free", True, "does not support padding_free: set it to False"),
        (trainer.template, "sequence_parallel_size", 2, "sequence_parallel_size: set it to 1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(ValueError, match=message):
                trainer._prepare_chord_dataset()
    with pytest.raises(ValueError, match="chunked micro-batches .* are not supported"):
        trainer._compute_loss_chunked()


@pytest.mark.parametrize("overlong", [False, True])
def test_the_loss_of_a_micro_batch(swift: Any, monkeypatch: Any, overlong: bool) -> None:
    """Trainer divides the loss by the number of micro-batches, but not swift's own metrics."""
    trainer = make(swift, micro_batches=4)
    mixer: Any = swift.Mixer(METHODS["constant"](mu=0.25), rows=3, batch=2, seed=5)
    trainer.mixer, trainer.overlong_filter = mixer, overlong
    observed: list[Any] = []
    monkeypatch.setattr(trainer, "observe_rollouts", lambda *call: observed.append(call))
    monkeypatch.setattr(trainer, "_demo_loss", lambda model: torch.tensor(3.0))
    batch = SimpleNamespace(
        completion_mask=torch.tensor([[True, True, False], [True, True, True]]),
        truncated_mask=torch.tensor([False, True]),
        advantages="advantages",
        ref_per_token_logps="ref",
    )
    compute, inputs = trainer._compute_loss_and_metrics, {"loss": torch.tensor(8.0)}
    loss, metrics = compute("model", inputs, batch)
    assert loss.item() == 0.75 * 8 + 4 * 0.25 * 3
    assert metrics == {"metrics": "of swift"}
    ((mask, advantages, ref),) = observed
    second = [False] * 3 if overlong else [True] * 3
    assert mask.tolist() == [[True, True, False], second]
    assert (advantages, ref) == ("advantages", "ref")
    assert [float(x) for x in mixer._rollout_losses] == [2]
    assert [float(x) for x in mixer._demo_losses] == [3]
    drawn = swift.Mixer(METHODS["constant"](), rows=3, batch=2, seed=5).draw()
    assert trainer._step_demos == [ROWS[i] for i in drawn]
    assert trainer._micro_batch == 1
    trainer.model.training = False
    assert compute("model", inputs, batch)[0].item() == 8
    assert len(observed) == 1


def test_swifts_teacher_has_a_weight_of_its_own(swift: Any, monkeypatch: Any) -> None:
    trainer = make(swift, micro_batches=4)
    monkeypatch.setattr(swift, "attach_head", lambda model: None)
    monkeypatch.setattr(swift, "base_model", lambda trainer: trainer.model)
    monkeypatch.setenv("GAC_METHOD", '{"name": "constant", "mu": 0.25}')
    monkeypatch.setenv("GAC_TEACHER", '{"coef": 0.5}')
    trainer.args.teacher_kl_coef = 0.0
    trainer._prepare_chord_dataset()
    monkeypatch.setattr(trainer, "_demo_loss", lambda model: torch.tensor(3.0))
    logps = torch.tensor([[-0.5, -1.0, -9.0]], requires_grad=True)
    trainer._rollout_scores = logps, None
    batch = SimpleNamespace(
        completion_mask=torch.tensor([[True, True, False]]),
        advantages=torch.ones(1, 3),
        ref_per_token_logps=None,
        teacher_per_token_logps=torch.tensor([[-1.5, -1.0, 0.0]]),
    )
    loss, _ = trainer._compute_loss_and_metrics("model", {"loss": torch.tensor(8.0)}, batch)
    assert loss.item() == 0.75 * 8 + 4 * 0.25 * 3 + 0.5 * (1 / 2) / 2  # k2 of one token of two
    assert torch.autograd.grad(loss, logps)[0].tolist() == [[0.5 * 1 / 2, 0, 0]]
    trainer._rollout_scores, batch.teacher_per_token_logps = (logps, None), None
    with pytest.raises(ValueError, match=r"GAC_TEACHER: .* set --teacher_model"):
        trainer._compute_loss_and_metrics("model", {"loss": torch.tensor(8.0)}, batch)


@pytest.mark.parametrize(
    ("teacher", "changes", "message"),
    [
        ('{"loss": "reverse_kl"}', {}, "GAC_TEACHER: loss='reverse_kl': .* use k2 or k3"),
        ('{"loss": "k4"}', {}, "GAC_TEACHER=.*loss='k4'"),
        ('{"weight": 1}', {}, "GAC_TEACHER=.*weight"),
        ("k2", {}, "GAC_TEACHER='k2': "),
        ('{"path": "x"}', {}, "teacher.path='x': another trainer scores the rollouts"),
        ("{}", {"teacher_kl_coef": 1.0}, "teacher_kl_coef=1.0 adds the same .* set it to 0"),
        ("{}", {"advantage_reweight": "rlsd"}, "advantage_reweight='rlsd' .* leave it out"),
    ],
)
def test_a_teacher_that_cannot_be(
    swift: Any, monkeypatch: Any, teacher: str, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("GAC_TEACHER", teacher)
    trainer = make(swift)
    vars(trainer.args).update(changes)
    with pytest.raises(ValueError, match=message):
        trainer._prepare_chord_dataset()


def test_demonstrations_that_cannot_be_used(swift: Any) -> None:
    trainer = make(swift)
    trainer.chord_sft_dataset = ROWS
    assert trainer._demonstration(1) is ROWS[1]
    assert [swift._num_targets(row) for row in ROWS] == [2, 1, 2, 0, 1]
    with pytest.raises(ValueError, match=r"chord_sft_dataset\[3\] has no completion tokens"):
        trainer._demonstration(3)
    with pytest.raises(ValueError, match="loss_scale is not supported: use --loss_scale default"):
        trainer._demonstration(4)


def test_the_demonstrations_of_a_micro_batch(swift: Any, monkeypatch: Any) -> None:
    """Labels are shifted, and the loss is divided by the tokens of the whole step."""
    trainer, calls = make(swift), []
    trainer._step_demos, trainer._micro_batch = ROWS[:3], 0
    monkeypatch.setattr(
        trainer, "score_demos", lambda *call: calls.append(call) or SimpleNamespace(loss="loss")
    )
    assert trainer._demo_loss("model") == "loss"
    ((model, inputs, targets, rows),) = calls
    assert targets.tolist() == [[4, 5, -100, -100], [8, -100, -100, -100], [3, 4, -100, -100]]
    assert (model, {*inputs}) == ("model", {"input_ids", "attention_mask"})
    assert inputs["input_ids"].tolist() == collate(ROWS[:3])["input_ids"].tolist()
    assert rows == [Row((0,) * n, 0, True) for n in (2, 1, 2)]
