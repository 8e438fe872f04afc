"""GACTrainer with the real TRL: gradients of optimizer steps, ranks, resuming, adapters, and
rejected options.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from gac import ControllerConfig  # noqa: E402 - after the skips
from gac.methods import GAC, METHODS, Constant  # noqa: E402 - after the skips
from tests import ranks as processes  # noqa: E402 - after the skips
from tests.integrations import plain, tiny, trl_task  # noqa: E402 - after the skips

MU = 0.3
TOLERANCE = 3e-6  # float32 rounding; the largest error observed is 1.4e-6


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """accelerate runs the garbage collector whenever training starts; exclude the imported modules
    to save time.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.write_model(folder)
    return folder


def fresh(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


@pytest.mark.parametrize(("loss", "reduction"), [("dapo", "token"), ("grpo", "sequence")])
@pytest.mark.parametrize(("micro_batches", "demo_batch"), [(1, 5), (4, 6), (4, 2)])
def test_the_gradient_of_a_step_is_that_of_plain_code(
    model: Path, tmp_path: Path, loss: str, reduction: str, micro_batches: int, demo_batch: int
):
    options = {
        "loss_type": loss,
        "per_device_train_batch_size": 16 // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "demo_batch": demo_batch,
    }
    made, watch = trl_task.trainer(model, tmp_path, controller=GAC(mu_init=MU), **options)
    made.train()
    reference = fresh(model)
    assert len(made.seen) == micro_batches
    assert len(made.shown[0]) == demo_batch
    rollouts = plain.rollout_term(reference, made.seen, trl_task.TEMPERATURE, reduction)
    mu = trl_task.column(made, "gac/mu")[0]
    assert mu == pytest.approx(MU + 0.01)
    demos = plain.demo_term(reference, made.shown[0], phi=True)
    expected = (1 - mu) * rollouts + mu * demos
    assert plain.error(watch.gradients[0], plain.gradient(reference, expected)) < TOLERANCE
    assert trl_task.column(made, "gac/demo_loss")[0] == pytest.approx(demos.item(), rel=1e-5)


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
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_loss_of_trl_is_mixed_as_it_is(model: Path, tmp_path: Path, name: str):
    """The gradient is (1 - mu) times GRPOTrainer's gradient plus mu times that of the
    demonstrations.
    """
    from trl import GRPOTrainer

    own, alone = trl_task.trainer(model, tmp_path, GRPOTrainer, **OPTIONS[name])
    own.train()
    made, mixed = trl_task.trainer(model, tmp_path, controller=Constant(mu=MU), **OPTIONS[name])
    made.train()
    reference = fresh(model)
    term = plain.demo_term(reference, made.shown[0], phi=False)
    theirs, ours = alone.gradients[0], plain.gradient(reference, term)
    expected = {n: (1 - MU) * theirs[n] + MU * ours[n] for n in ours}
    assert plain.error(mixed.gradients[0], expected) < TOLERANCE
    assert trl_task.column(made, "gac/mu") == [MU] * len(mixed.gradients)


def test_a_rate_of_zero_trains_as_trl_does(model: Path, tmp_path: Path):
    from trl import GRPOTrainer

    own, _ = trl_task.trainer(model, tmp_path, GRPOTrainer, max_steps=3)
    own.train()
    made, _ = trl_task.trainer(model, tmp_path, controller=Constant(mu=0.0), max_steps=3)
    made.train()
    for name, weight in trl_task.weights(own).items():
        torch.testing.assert_close(trl_task.weights(made)[name], weight, rtol=0, atol=1e-6)


def test_adapters_learn_and_the_base_does_not(model: Path, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made, watch = trl_task.trainer(model, tmp_path, peft_config=adapters, beta=1e-30)
    start = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    made.train()
    reference = get_peft_model(fresh(model), adapters)
    reference.load_state_dict(start, strict=False)
    rollouts = plain.rollout_term(reference, made.seen, trl_task.TEMPERATURE, "token")
    expected = (1 - MU) * rollouts + MU * plain.demo_term(reference, made.shown[0], phi=False)
    found = {n: g for n, g in watch.gradients[0].items() if ".ref." not in n}
    assert plain.error(found, plain.gradient(reference, expected)) < TOLERANCE


def test_options_of_the_trainer_run_with_it(model: Path, tmp_path: Path):
    """bfloat16 autocast, gradient checkpointing and a float32 head together give finite losses and
    gradients.
    """
    options = {"bf16": True, "gradient_checkpointing": True, "cast_lm_head_to_fp32": True}
    made, _ = trl_task.trainer(model, tmp_path, max_steps=2, **options)
    made.train()
    values = trl_task.column(made, "gac/demo_loss") + trl_task.column(made, "grad_norm")
    assert len(values) == 4
    assert all(0 < value < 100 for value in values)


def test_the_controller_sees_the_step(model: Path, tmp_path: Path):
    """The logged signals match plain torch code over the whole step."""
    made, _ = trl_task.trainer(model, tmp_path, controller=GAC(), beta=1e-30)
    made.train()
    advantages = torch.cat([batch["advantages"] for batch in made.seen])
    assert trl_task.column(made, "gac/rl_variance")[0] == pytest.approx(
        advantages.var(correction=0).item(), rel=1e-5
    )
    reference = fresh(model)
    losses = [plain.demo_term(reference, [row], phi=False).item() for row in made.shown[0]]
    assert trl_task.column(made, "gac/sft_variance")[0] == pytest.approx(
        torch.tensor(losses).var(correction=0).item(), rel=1e-4
    )
    assert trl_task.column(made, "gac/kl") == [0.0]
    assert set(made.state.log_history[0]) >= {
        "gac/mu_star",
        "gac/alpha",
        "gac/prior",
        "gac/disagreement",
        "gac/demo_loss",
    }


@pytest.mark.dist
def test_two_processes_and_resuming(model: Path, tmp_path: Path):
    """The averaged gradient is that of the step, mu is the same on both ranks, and a resumed run
    matches an uninterrupted one.

    A run whose ranks have different values of mu fails before its first step."""
    ranks = processes.run(trl_task.resumed, model, tmp_path, ranks=2)
    reference = fresh(model)
    seen = [batch for rank in ranks for batch in rank["seen"]]
    assert len(seen) == 4
    mu = ranks[0]["logged"][0]
    rollouts = plain.rollout_term(reference, seen, trl_task.TEMPERATURE, "token")
    demos = plain.demo_term(reference, ranks[0]["shown"], phi=True)
    expected = plain.gradient(reference, (1 - mu) * rollouts + mu * demos)
    assert ranks[0]["shown"] == ranks[1]["shown"]
    for rank in ranks:
        assert plain.error(rank["gradient"], expected) < TOLERANCE
        assert rank["mu"] == ranks[0]["mu"] == rank["again_mu"]
        for name, weight in rank["weights"].items():
            assert torch.equal(rank["again"][name], weight), name
        assert rank["refusal"].startswith("mu differs over the ranks, [0.1, 0.2]: load the same")
    assert len(ranks[0]["logged"]) == 4
    assert len(set(ranks[0]["logged"])) > 1


def test_a_checkpoint_without_controller_is_not_resumed(model: Path, tmp_path: Path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    made, _ = trl_task.trainer(model, tmp_path, **options)
    made.train()
    saved = tmp_path / "checkpoint-1"
    again, _ = trl_task.trainer(model, tmp_path, controller=GAC(), **options)
    with pytest.raises(ValueError, match="the saved controller is 'constant' and this run's 'gac'"):
        again.train(resume_from_checkpoint=str(saved))
    (saved / "gac.json").unlink()
    again, _ = trl_task.trainer(model, tmp_path, **options)
    with pytest.raises(FileNotFoundError, match="saved without a controller"):
        again.train(resume_from_checkpoint=str(saved))
    shutil.rmtree(saved)


def test_messages_become_the_prompts_that_the_trainer_writes(model: Path, tmp_path: Path):
    """The last message, up to EOS, is the target; all earlier messages form the prompt."""
    from gac.integrations.demonstrations import encode

    words = trl_task.tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ '+' if m.role == 'user' else '=' }}{{ m.content }}"
        "{% if m.role == 'assistant' %}<eos>-{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    turns = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
    found = encode({"messages": turns}, "row", words)
    assert words.decode(found["ids"]) == "+12=3<eos>"
    assert words.decode(found["ids"][: found["start"]]) == "+12="
    split = encode({"prompt": turns[:1], "completion": turns[1:]}, "row", words)
    assert split == found
    text = encode({"prompt": "+12=", "completion": "3"}, "row", words)
    assert text == found


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "1"}], r"columns \['text'\]: give prompt and completion, or messages"),
        (
            [{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": ""}],
            r"demo_dataset\[1\] has the completion '': remove the row",
        ),
        ([{"prompt": "", "completion": "2"}], r"demo_dataset\[0\] has the prompt ''"),
        (
            [
                {
                    "messages": [
                        {"role": "assistant", "content": "1"},
                        {"role": "user", "content": "2"},
                    ]
                }
            ],
            "ends with a message by 'user'",
        ),
    ],
)
def test_bad_demonstrations_are_named(model: Path, tmp_path: Path, rows: Any, message: str):
    with pytest.raises(ValueError, match=message):
        trl_task.trainer(model, tmp_path, demo_dataset=datasets.Dataset.from_list(rows))


def test_what_is_not_supported_is_refused(model: Path, tmp_path: Path):
    from peft import PromptTuningConfig

    def refused(message: str, kind: type[Exception] = ValueError, **changes: Any) -> None:
        with pytest.raises(kind, match=message):
            trl_task.trainer(model, tmp_path, **changes)

    refused("refuses torch_compile", torch_compile=True)
    virtual = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    refused("refuses peft_config: virtual tokens", peft_config=virtual)
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    refused("set use_reentrant to False", gradient_checkpointing=True, **reentrant)
    refused("batch=0: use a number of demonstrations", demo_batch=0)
    refused("use a Dataset", TypeError, demo_dataset=[{"prompt": "1", "completion": "2"}])
    for name in ("luffy", "gac-gated", "gac-gated-sketch"):
        refused(f"controller={name}: it needs .*: use gac, chord", controller=METHODS[name]())
    refused("for estimator='biased'", controller=ControllerConfig(estimator="biased"))


def test_what_needs_other_models_or_packages_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from accelerate import ParallelismConfig

    from gac.integrations.hf_trainer import refuse
    from gac.integrations.trl import _refused

    made, _ = trl_task.trainer(model, tmp_path)
    with pytest.raises(ValueError, match="images"):
        made._compute_loss(made.model, {"pixel_values": torch.zeros(1)})
    refuse("GACTrainer", _refused(made))
    state = type(made.accelerator.state)
    zero3 = property(lambda _: SimpleNamespace(zero_stage=3))
    tensor = property(lambda _: ParallelismConfig(tp_size=2))
    for owner, name, value, option in (
        (made, "aux_loss_enabled", True, "router_aux_loss_coef"),
        (made, "use_liger_kernel", True, "use_liger_kernel"),
        (state, "deepspeed_plugin", zero3, "deepspeed: ZeRO-3"),
        (type(made.accelerator), "parallelism_config", tensor, "parallelism_config"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            with pytest.raises(ValueError, match=f"GACTrainer refuses {option}"):
                refuse("GACTrainer", _refused(made))


def test_the_example_learns(tmp_path: Path):
    from examples import trl_gac

    logged = trl_gac.run(8, str(tmp_path))
    losses = [row["gac/demo_loss"] for row in logged]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
