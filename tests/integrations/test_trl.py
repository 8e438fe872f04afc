"""GACTrainer with the real TRL: gradients, ranks, resuming, LoRA, unsupported options."""

import importlib.metadata
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from transformers import AutoModelForCausalLM  # noqa: E402 - after the skips

from gac import ControllerConfig  # noqa: E402 - after the skips
from gac.demo import task  # noqa: E402 - after the skips
from gac.imports import load_object  # noqa: E402 - after the skips
from gac.integrations.demonstrations import row_of  # noqa: E402 - after the skips
from gac.methods import GAC, METHODS, Constant  # noqa: E402 - after the skips
from gac.methods.teacher import TeacherConfig  # noqa: E402 - after the skips
from gac.order import Order  # noqa: E402 - after the skips
from gac_kernels import DemoWeight  # noqa: E402 - after the skips
from gac_kernels.heads.trl.head import missing_hook  # noqa: E402 - after the skips
from tests import ranks as processes  # noqa: E402 - after the skips
from tests.integrations import plain, recording, tiny, trl_task  # noqa: E402 - after the skips

MU = 0.3
TOLERANCE = 3e-6  # float32 rounding; the largest error observed is 1.4e-6
TRL = importlib.metadata.version("trl")
needs_hook = pytest.mark.skipif(
    missing_hook() is not None or TRL.startswith("1.15."),
    reason="TRL 1.15's own head needs a GPU; earlier versions have none to replace",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.write_model(folder)
    return folder


@pytest.mark.parametrize(
    ("loss", "reduction", "weight"), [("dapo", "token", "phi"), ("grpo", "sequence", "shaped")]
)
@pytest.mark.parametrize(("micro_batches", "demo_batch"), [(1, 5), (4, 6), (4, 2)])
def test_step_gradient_matches_plain_torch(
    model: Path,
    tmp_path: Path,
    loss: str,
    reduction: str,
    weight: str,
    micro_batches: int,
    demo_batch: int,
):
    options = {
        "loss_type": loss,
        "per_device_train_batch_size": 16 // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "demo_batch": demo_batch,
        "controller": GAC(mu_init=MU, weight=DemoWeight(weight)),
    }
    trainer, recorder = trl_task.trained(model, tmp_path, **options)
    reference = AutoModelForCausalLM.from_pretrained(model)
    assert len(trainer.micro_batches) == micro_batches
    assert len(trainer.demos_per_step[0]) == demo_batch
    rollouts = plain.rollout_term(reference, trainer.micro_batches, trl_task.TEMPERATURE, reduction)
    mu = recording.column(trainer, "gac/mu")[0]
    assert mu == pytest.approx(MU + 0.01)
    demos = plain.demo_term(reference, trainer.demos_per_step[0], weight=weight)
    expected = (1 - mu) * rollouts + mu * demos
    assert (
        plain.relative_error(recorder.gradients[0], plain.gradient(reference, expected)) < TOLERANCE
    )
    assert recording.column(trainer, "gac/demo_loss")[0] == pytest.approx(demos.item(), rel=1e-5)


TEACHERS = {
    "reverse KL": TeacherConfig(loss="reverse_kl", top_k=5, coef=0.7),
    "forward KL": TeacherConfig(loss="forward_kl", top_k=3),
    "sampled": TeacherConfig(loss="k3", coef=2.0),
}


@needs_hook
@pytest.mark.parametrize("mu", [MU, 1.0])
@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_adds_its_gradient_whatever_mu_is(
    model: Path, tmp_path: Path, name: str, mu: float
):
    """Against log-softmax code in float64, over two micro-batches."""
    teacher = TEACHERS[name]
    tiny.write_model(tmp_path / "teacher", hidden_size=24, initializer_range=0.2)
    trainer, recorder = trl_task.trained(
        model,
        tmp_path,
        controller=Constant(mu=mu),
        teacher=teacher,
        teacher_model=AutoModelForCausalLM.from_pretrained(tmp_path / "teacher"),
    )
    reference, other = (
        AutoModelForCausalLM.from_pretrained(path).double()
        for path in (model, tmp_path / "teacher")
    )
    assert len(trainer.micro_batches) == 2
    taught = plain.teacher_term(
        reference,
        other,
        trainer.micro_batches,
        temperature=trl_task.TEMPERATURE,
        loss=teacher.loss,
        top_k=teacher.candidates or 0,
    )
    rollouts = plain.rollout_term(
        reference, trainer.micro_batches, trl_task.TEMPERATURE, reduction="token"
    )
    demos = plain.demo_term(reference, trainer.demos_per_step[0], weight="one")
    without = plain.gradient(reference, (1 - mu) * rollouts + mu * demos)
    of_teacher = plain.gradient(reference, teacher.coef * taught)
    expected = {name: without[name] + of_teacher[name] for name in without}
    assert plain.relative_error(recorder.gradients[0], expected) < TOLERANCE
    assert plain.relative_error(without, expected) > 0.01
    assert recording.column(trainer, "gac/teacher_loss")[0] == pytest.approx(
        taught.item(), rel=1e-5
    )


@needs_hook
def test_a_teachers_log_probs_come_with_the_batch(model: Path, tmp_path: Path):
    """Of a user's trainer, in place of a model; without them, the error names the argument."""
    sampled = TeacherConfig(loss="k2")
    tiny.write_model(tmp_path / "teacher", hidden_size=24, initializer_range=0.2)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")

    class Served(trl_task.RecordingTrainer):
        """Gets the log-probs from elsewhere."""

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            ids, mask = (
                torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1)
                for kind in ("ids", "mask")
            )
            with torch.no_grad():
                logps = plain.logprobs(teacher, ids, mask, trl_task.TEMPERATURE)
            return batch | {"teacher_logps": logps[:, -batch["completion_ids"].shape[1] :]}

    served, recorder = trl_task.trained(model, tmp_path, Served, teacher=sampled)
    scored, other = trl_task.trained(model, tmp_path, teacher=sampled, teacher_model=teacher)
    assert plain.relative_error(recorder.gradients[0], other.gradients[0]) < TOLERANCE
    column = recording.column(served, "gac/teacher_loss")
    assert column == pytest.approx(recording.column(scored, "gac/teacher_loss"), rel=1e-5)
    for loss, missing in (("k2", "teacher_logps"), ("reverse_kl", "teacher_ids")):
        trainer, _ = trl_task.make_trainer(
            model,
            tmp_path,
            Served if loss != "k2" else trl_task.RecordingTrainer,
            teacher=TeacherConfig(loss=loss),
        )
        with pytest.raises(ValueError, match=f"{missing} is missing in the batch: .*{loss!r}"):
            trainer.train()


def test_a_teacher_needs_the_fused_loss_and_its_vocabulary(model: Path, tmp_path: Path):
    teacher = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ValueError, match=r"^teacher.top_k=999: the vocabulary has \d+ tokens"):
        trl_task.make_trainer(
            model, tmp_path, teacher=TeacherConfig(top_k=999), teacher_model=teacher
        )
    options = {"top_entropy_quantile": 0.5, "teacher": TeacherConfig(top_k=4)}
    trainer, _ = trl_task.make_trainer(model, tmp_path, teacher_model=teacher, **options)
    with pytest.raises(ValueError, match="^teacher: the fused loss, to which it is added, lacks "):
        trainer.train()


def test_the_users_method_of_the_page_runs_in_trl(model: Path, tmp_path: Path):
    """It needs nothing but the rewards, which the trainer measures."""
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (source,) = (block for block in blocks if "Threshold" in block)
    (tmp_path / "my_method.py").write_text(source)
    method = load_object(f"{tmp_path / 'my_method.py'}:Threshold", "method")
    reached = {}
    for level in (0.0, 1.0):
        trainer, _ = trl_task.trained(
            model, tmp_path / str(level), controller=method(level=level), max_steps=2
        )
        reached[level] = recording.column(trainer, "gac/mu")
        rewards = recording.column(trainer, "reward")
        assert 0 < rewards[0] < 1
    assert reached == {0.0: [0.9, 0.1], 1.0: [0.9, 0.9]}


def test_a_trainers_rewards_reach_the_method(model: Path, tmp_path: Path):
    method = METHODS["reward-threshold"](threshold=0.9)
    trainer, _ = trl_task.trained(model, tmp_path, controller=method, max_steps=2)
    rewards, mu = (recording.column(trainer, name) for name in ("reward", "gac/mu"))
    assert mu == pytest.approx([0.9, 0.9 - rewards[0]], rel=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    **{loss: {"loss_type": loss} for loss in ("bnpo", "dr_grpo", "cispo", "sapo", "vespo")},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "reuse, clip and KL": {
        "num_iterations": 2,
        "max_steps": 2,
        "beta": 0.1,
        "delta": 4.0,
        "learning_rate": 1e-2,
    },
    "entropy": {"top_entropy_quantile": 0.5, "mask_truncated_completions": True},
    "mu 0": {"max_steps": 3},
}


@pytest.mark.parametrize(
    "name",
    [
        "cispo",
        "vespo",
        "reuse, clip and KL",
        "entropy",
        "mu 0",
        *(
            pytest.param(
                name,
                marks=pytest.mark.full(reason="test_trl_fused.py compares all loss types with TRL"),
            )
            for name in ("bnpo", "dr_grpo", "sapo", "luspo", "gspo")
        ),
    ],
)
def test_every_trl_loss_is_mixed_unchanged(model: Path, tmp_path: Path, name: str):
    """The gradient is (1 - mu) times GRPOTrainer's plus mu times that of the demonstrations.

    With mu 0, so is that of the last step: the trainers have taken the same steps.
    """
    from trl import GRPOTrainer

    mu, step = (0.0, -1) if name == "mu 0" else (MU, 0)
    _, grpo_recorder = trl_task.trained(model, tmp_path, GRPOTrainer, **OPTIONS[name])
    trainer, recorder = trl_task.trained(
        model, tmp_path, controller=Constant(mu=mu), **OPTIONS[name]
    )
    reference = AutoModelForCausalLM.from_pretrained(model)
    term = plain.demo_term(reference, trainer.demos_per_step[0], weight="one")
    rollout_grads, demo_grads = grpo_recorder.gradients[step], plain.gradient(reference, term)
    expected = {n: (1 - mu) * rollout_grads[n] + mu * g for n, g in demo_grads.items()}
    assert plain.relative_error(recorder.gradients[step], expected) < TOLERANCE
    assert recording.column(trainer, "gac/mu") == [mu] * len(recorder.gradients)


def test_lora_gradient_matches_plain_torch(model: Path, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer, recorder = trl_task.make_trainer(model, tmp_path, peft_config=adapters, beta=1e-30)
    start = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    reference = get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapters)
    reference.load_state_dict(start, strict=False)
    rollouts = plain.rollout_term(reference, trainer.micro_batches, trl_task.TEMPERATURE, "token")
    expected = (1 - MU) * rollouts + MU * plain.demo_term(
        reference, trainer.demos_per_step[0], weight="one"
    )
    gradient = {n: g for n, g in recorder.gradients[0].items() if ".ref." not in n}
    assert plain.relative_error(gradient, plain.gradient(reference, expected)) < TOLERANCE


@pytest.mark.full(reason="seconds to compile; test_transformers.py compiles with the fused head")
def test_compiled_model(tmp_path: Path):
    gradients = []
    tiny.write_model(tmp_path / "model", num_hidden_layers=1)  # compiling is slow
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer, recorder = trl_task.trained(
            tmp_path / "model", tmp_path, gradient_accumulation_steps=1, **options
        )
        assert missing_hook() or trainer.rollout_out is not None
        gradients.append(recorder.gradients[0])
    assert plain.relative_error(gradients[1], gradients[0]) < TOLERANCE


def test_logged_signals_match_plain_torch(model: Path, tmp_path: Path):
    """The logged signals match plain torch code over the whole step."""
    trainer, _ = trl_task.trained(model, tmp_path, controller=GAC(), beta=1e-30)
    advantages = torch.cat([batch["advantages"] for batch in trainer.micro_batches])
    assert recording.column(trainer, "gac/rl_variance")[0] == pytest.approx(
        advantages.var(correction=0).item(), rel=1e-5
    )
    reference = AutoModelForCausalLM.from_pretrained(model)
    order = Order(len(trainer._demos), 3)  # with the trainer's seed
    assert trainer.demos_per_step[0] == [*map(row_of, trainer._demos.select(order.take(5)))]
    losses = [
        plain.demo_term(reference, [row], weight="one").item() for row in trainer.demos_per_step[0]
    ]
    assert recording.column(trainer, "gac/sft_variance")[0] == pytest.approx(
        torch.tensor(losses).var(correction=0).item(), rel=1e-4
    )
    # policy and reference differ by the rounding of two forward passes; k3 is half its square
    assert recording.column(trainer, "gac/kl")[0] < 1e-12
    assert set(trainer.state.log_history[0]) >= {
        "gac/mu_star",
        "gac/alpha",
        "gac/prior",
        "gac/disagreement",
        "gac/demo_loss",
    }


@pytest.fixture(scope="module")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks computed in `train_and_resume`."""
    untied = None
    if not needs_hook.args[0]:
        untied = tmp_path_factory.mktemp("untied")
        tiny.write_model(untied, tie_word_embeddings=False)
    out = tmp_path_factory.mktemp("two_ranks")
    return processes.run(trl_task.train_and_resume, model, untied, out, ranks=2)


@pytest.mark.dist
def test_two_ranks_match_and_resume_exactly(model: Path, two_ranks: list[dict[str, Any]]):
    """The averaged gradient is that of the full step, and resuming is exact.

    A run whose ranks have different values of mu fails in its first step.
    """
    reference = AutoModelForCausalLM.from_pretrained(model)
    micro_batches = [batch for rank in two_ranks for batch in rank["micro_batches"]]
    assert len(micro_batches) == 4
    mu = two_ranks[0]["logged"][0]
    rollouts = plain.rollout_term(reference, micro_batches, trl_task.TEMPERATURE, "token")
    demos = plain.demo_term(reference, two_ranks[0]["demos"], weight="phi")
    expected = plain.gradient(reference, (1 - mu) * rollouts + mu * demos)
    assert two_ranks[0]["demos"] == two_ranks[1]["demos"]
    for rank in two_ranks:
        assert plain.relative_error(rank["gradient"], expected) < TOLERANCE
        assert rank["mu"] == two_ranks[0]["mu"] == rank["resumed_mu"]
        for name, weight in rank["weights"].items():
            assert torch.equal(rank["resumed"][name], weight), name
        assert re.search(r"\[0\.1, 0\.2\].*same controller", rank["error_message"])
    assert len(two_ranks[0]["logged"]) == 4
    assert len(set(two_ranks[0]["logged"])) > 1


@pytest.mark.dist
@needs_hook
def test_weights_sharded_by_fsdp2(two_ranks: list[dict[str, Any]]):
    for rank in two_ranks:
        expected, actual = rank["sharded"]
        assert plain.relative_error(actual, expected) < TOLERANCE


def test_a_checkpoint_without_controller_is_not_resumed(model: Path, tmp_path: Path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trl_task.trained(model, tmp_path, **options)
    saved = tmp_path / "checkpoint-1"
    resumed, _ = trl_task.make_trainer(model, tmp_path, controller=GAC(), **options)
    with pytest.raises(ValueError, match="'constant'.*'gac'.*same controller"):
        resumed.train(resume_from_checkpoint=str(saved))
    (saved / "gac.json").unlink()
    resumed, _ = trl_task.make_trainer(model, tmp_path, **options)
    with pytest.raises(FileNotFoundError, match=r"gac\.json.*saved without a controller"):
        resumed.train(resume_from_checkpoint=str(saved))
    shutil.rmtree(saved)


def test_demonstrations_are_formatted_like_the_prompts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The trainer's `chat_template_kwargs` apply to both; methods that read the KL need beta."""
    tokenizer = task.make_tokenizer()
    tokenizer.chat_template = (
        "{{ lead if tools is none }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    monkeypatch.setattr(task, "make_tokenizer", lambda: tokenizer)
    turns = [{"role": "user", "content": "2="}, {"role": "assistant", "content": "3"}]
    rows = datasets.Dataset.from_list([{"messages": turns}])
    for beta, lead, method in ((1e-30, "1+", GAC()), (0.0, "", Constant()), (0.0, "1+", GAC())):
        assert "beta=0.0" not in caplog.text
        options = {"beta": beta, "chat_template_kwargs": {"lead": lead} if lead else None}
        options |= {"controller": method, "demo_dataset": rows}
        trainer, _ = trl_task.make_trainer(model, tmp_path, **options)
        assert tokenizer.decode(trainer._demos[0]["ids"]) == f"{lead}2=3<eos>"
    assert "beta=0.0: without a reference model, the KL is unknown to gac, and" in caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "1"}], r"demo_dataset.*\['text'\].*prompt and completion, or messages"),
        (
            [{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": ""}],
            r"demo_dataset\[1\].*''.*remove the row",
        ),
        ([{"prompt": "", "completion": "2"}], r"demo_dataset\[0\].*''.*use a non-empty prompt"),
        (
            [{"messages": [{"role": "user", "content": "1"}]}],
            "must come from the assistant, but its role is 'user'",
        ),
    ],
)
def test_bad_demonstrations_are_named(model: Path, tmp_path: Path, rows: Any, message: str):
    with pytest.raises(ValueError, match=message):
        trl_task.make_trainer(model, tmp_path, demo_dataset=datasets.Dataset.from_list(rows))


def test_unsupported_options_are_rejected(model: Path, tmp_path: Path):
    from peft import PromptTuningConfig

    def assert_rejected(message: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            trl_task.make_trainer(model, tmp_path, **changes)

    virtual = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    assert_rejected("does not support peft_config: .*LoRA", peft_config=virtual)
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert_rejected("set use_reentrant to False", gradient_checkpointing=True, **reentrant)
    assert_rejected("demo_batch=0: use a number of demonstrations", demo_batch=0)
    assert_rejected(
        "demo_dataset is a list: use", TypeError, demo_dataset=[{"prompt": "1", "completion": "2"}]
    )
    assert_rejected("controller=grpo trains on only rollouts", controller=METHODS["grpo"]())
    for name, use in (("luffy", "a .* gac"), ("gac-gated", "a .* gac"), ("kl-ctrl", "beta=1e-30")):
        assert_rejected(f"controller={name} .*use {use}", controller=METHODS[name]())
    assert_rejected("estimator='biased'", controller=ControllerConfig(estimator="biased"))


def test_unsupported_models_and_parallelism_are_rejected(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from accelerate import ParallelismConfig

    from gac.integrations.trl import _unsupported_options
    from gac.mixer import refuse

    trainer, _ = trl_task.make_trainer(model, tmp_path)
    with pytest.raises(ValueError, match="images"):
        trainer._compute_loss(trainer.model, {"pixel_values": torch.zeros(1)})
    refuse("GACTrainer", _unsupported_options(trainer))
    state = type(trainer.accelerator.state)
    zero3 = property(lambda _: SimpleNamespace(zero_stage=3))
    tensor = property(lambda _: ParallelismConfig(tp_size=2))
    for owner, name, value, option in (
        (trainer, "aux_loss_enabled", True, "router_aux_loss_coef"),
        (state, "deepspeed_plugin", zero3, "deepspeed: ZeRO-3"),
        (type(trainer.accelerator), "parallelism_config", tensor, "parallelism_config"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            with pytest.raises(ValueError, match=f"GACTrainer does not support {option}"):
                refuse("GACTrainer", _unsupported_options(trainer))


@pytest.mark.skipif(missing_hook() is None, reason="for TRL versions without a fused head")
def test_earlier_versions_keep_the_loss_of_trl(model: Path, tmp_path: Path, caplog):
    from trl import GRPOTrainer

    from gac_kernels.heads.trl import FusedGRPOTrainer, apply_fused_head

    message = f"trl=={TRL}: .*use TRL 1.15 or later"
    with pytest.raises(ImportError, match=message):
        apply_fused_head()
    gradients = []
    for kind in (GRPOTrainer, FusedGRPOTrainer):
        _, recorder = trl_task.trained(model, tmp_path, kind)
        gradients.append(recorder.gradients[0])
    assert plain.relative_error(gradients[1], gradients[0]) < TOLERANCE
    assert re.search(message, caplog.text)


def test_the_example_learns(tmp_path: Path):
    from examples import trl_gac

    losses = [row["gac/demo_loss"] for row in trl_gac.run(8, str(tmp_path))]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
