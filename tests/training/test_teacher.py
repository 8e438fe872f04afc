"""A teacher in `gac train`: its scores, its keys, its weights, and runs that resume."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from gac.config import load
from gac.errors import ConfigError, UserError
from gac.models.head import Head
from gac.train_config import TrainConfig
from gac.training.check import load_checked
from gac.training.trainer import Trainer
from gac_kernels import linear_token_logprobs
from tests.tiny import metrics, take_steps, tiny_config, write_teacher

SELF = {"self": True, "top_k": 4}


@pytest.fixture(scope="module")
def taught(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with the tokenizer of the tiny task."""
    return write_teacher(task, tmp_path_factory.mktemp("taught") / "teacher")


def trainer_of(task: Path, out: Path, teacher: dict, **changes) -> Trainer:
    changes = {"method": "grpo", "eval": {}, **changes}
    return Trainer(tiny_config(task, out, teacher=teacher, **changes))


def recorded(trainer: Trainer) -> list[torch.Tensor]:
    """A list to which each update of the weights appends its gradient."""
    gradients: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(
            torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        )
    )
    return gradients


@pytest.mark.parametrize("scaling", [(1.0, None), (0.5, 3.0)])
def test_the_most_probable_tokens_have_the_log_probs_of_the_scorer(scaling) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=g) for shape in ((2, 300, 8), (37, 8), (37,))
    )
    positions = torch.randperm(600, generator=g)[:555]  # more than one block of rows
    head = Head(hidden, weight, bias, scaling=scaling)
    logps, ids = head.top_logprobs(positions, 5, temperature=1.3)
    expected, _ = linear_token_logprobs(
        hidden.flatten(0, 1)[positions],
        weight,
        ids,
        bias=bias,
        temperature=1.3,
        logit_scale=scaling[0],
        softcap=scaling[1],
    )
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    assert (logps.diff() <= 0).all()
    every = head.scaled(torch.nn.functional.linear(hidden, weight, bias)).flatten(0, 1)[positions]
    assert torch.equal(ids, every.topk(5).indices)
    plain = Head(None, logits=torch.nn.functional.linear(hidden, weight, bias), scaling=scaling)
    for ours, other in zip(plain.top_logprobs(positions, 5, 1.3), (logps, ids), strict=True):
        torch.testing.assert_close(ours, other)
    fewer, few = head.top_logprobs(positions, 5, vocabulary=9)
    assert few.max() < 9
    assert (fewer.exp().sum(-1) <= 1 + 1e-6).all()


def test_a_teacher_scores_what_the_policy_wrote(task, taught, tmp_path) -> None:
    """Each row alone, by the logits of the teacher's own forward, at the rollouts' temperature."""
    sizes = {"num_prompts": 3, "num_generations": 4, "max_completion_length": 5}
    trainer = trainer_of(
        task,
        tmp_path,
        {"path": str(taught), "top_k": 3},
        rollouts={**sizes, "temperature": 1.3},
        max_tokens_per_micro_batch=40,
    )
    rows = trainer._sample()
    tails = []
    for row in rows:
        model = trainer.teacher_model
        logits = model(input_ids=torch.tensor([row.ids])).logits[0, row.start - 1 : -1]
        logps = (logits / 1.3).log_softmax(-1)
        tails += (1 - logps.topk(3).values.exp().sum(-1)).tolist()
        own, ids = (
            x[row.sequence] for x in (trainer.rollouts.teacher_logps, trainer.rollouts.teacher_ids)
        )
        torch.testing.assert_close(own, logps.topk(3).values, rtol=1e-4, atol=1e-5)
        assert ids.tolist() == logps.topk(3).indices.tolist()
    total, count = trainer.rollouts.means["teacher_tail"]
    assert (total, count) == (pytest.approx(sum(tails), rel=1e-4), len(tails))
    (line,) = take_steps(trainer_of(task, tmp_path / "again", {"path": str(taught), "top_k": 3}), 1)
    assert 0 < line["teacher_loss"] < 9
    assert 0 < line["teacher_tail"] < 1
    (line,) = take_steps(trainer_of(task, tmp_path / "own", {}, method="sdar"), 1)
    assert "teacher_loss" not in line  # its teacher is a part of the rollout loss


@pytest.mark.parametrize("method", ["constant-alarm", "gac", "multitask"])
def test_a_mixing_method_adds_the_teachers_gradient(method: str, task, taught, tmp_path) -> None:
    """Its gradient at coef 0, plus coef times that of the same rollouts under opd, whatever mu."""

    def gradient(name: str, coef: float) -> torch.Tensor:
        teacher = {"path": str(taught), "top_k": 5, "coef": coef}
        out = tmp_path / f"{name}-{coef}"
        trainer = trainer_of(task, out, teacher, method=name)
        gradients = recorded(trainer)
        (line,) = take_steps(trainer, 1)
        assert line["teacher_loss"] > 0
        return gradients[0]

    without, with_teacher = gradient(method, 0.0), gradient(method, 0.7)
    expected = 0.7 * gradient("opd", 1.0)
    assert expected.norm() > 0.01 * without.norm()
    torch.testing.assert_close(with_teacher - without, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("kind", ["a model", "the policy", "an average"])
def test_the_whole_vocabulary_equals_as_many_tokens(
    kind: str, loss: str, packed: bool, task, taught, tmp_path
) -> None:
    """The divergence of whole distributions has the gradient of K tokens that are all tokens."""
    size = json.loads((task / "init" / "config.json").read_text())["vocab_size"]
    teacher = {"path": str(taught)} if kind == "a model" else {"self": True}
    teacher |= {"update_rate": 0.5} if kind == "an average" else {}
    rows = {"micro_batch_size": None, "max_tokens_per_micro_batch": 40} if packed else {}
    changes = {**rows, "loss": {"rollout_reduction": "sequence"}, "optim": {"lr": 1e-2}}
    found = []
    for top_k in (size, None):
        keys = {**teacher, "loss": loss, "top_k": top_k, "coef": 0.7}
        trainer = trainer_of(task, tmp_path / str(top_k), keys, method="constant-alarm", **changes)
        gradients = recorded(trainer)
        lines = take_steps(trainer, 2)
        assert bool(trainer.teacher.head) == (top_k is None)
        found.append((lines, torch.stack(gradients)))
    (expected, gradient), (lines, ours) = found
    assert len(gradient) == 2
    assert "teacher_tail" not in lines[0]
    losses = [[line["teacher_loss"] for line in part] for part in (lines, expected)]
    # the bin for all others has the rounding of the sum of the teacher's probabilities
    rest = 8 * torch.finfo(torch.float32).eps
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=-rest * math.log(rest))
    torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl"])
def test_the_whole_vocabulary_in_float64(loss: str, task, taught, tmp_path) -> None:
    teacher = {"path": str(taught), "loss": loss, "top_k": None}
    rollouts = {"num_prompts": 3, "num_generations": 2, "temperature": 1.3}
    mean = {"rollout_reduction": "token"}
    trainer = trainer_of(task, tmp_path, teacher, method="opd", rollouts=rollouts, loss=mean)
    start = {name: x.clone() for name, x in trainer.policy.state_dict().items()}
    (line,) = take_steps(trainer, 1)
    trainer.policy.load_state_dict(start)
    total, count = 0.0, 0
    for row in trainer.rollouts.rows:
        own, other = (
            (model(input_ids=torch.tensor([row.ids])).logits[0, row.start - 1 : -1].double() / 1.3)
            .log_softmax(-1)
            .detach()
            for model in (trainer.model, trainer.teacher_model)
        )
        p, q = (own, other) if loss == "reverse_kl" else (other, own)
        total, count = total + float((p.exp() * (p - q)).sum()), count + len(own)
    assert line["teacher_loss"] == pytest.approx(total / count, rel=1e-5)


def test_rollouts_without_a_demonstration_have_no_teacher(task, tmp_path) -> None:
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) > 2
    for row in rows[::2]:
        row["solution"] = None
    (tmp_path / "half.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"prompts": str(tmp_path / "half.jsonl")}
    for name, keys in {"k2": {"loss": "k2"}, "4": {"top_k": 4}, "all": {"top_k": None}}.items():
        teacher = {"self": True, **keys}
        trainer = trainer_of(task, tmp_path / name, teacher, data=data, method="opd")
        taught_rows = {row.sequence for row in trainer._sample() if row.context}
        scores = trainer.rollouts.teacher_logps or trainer.rollouts.teacher_hidden
        assert 0 < len(taught_rows) < len(scores)
        for i, logps in enumerate(scores):
            assert bool(logps.isnan().all()) == (i not in taught_rows)
        (line,) = take_steps(trainer, 1)
        assert math.isfinite(line["teacher_loss"])
        assert line["skipped"] == 0


SETTINGS = {
    "a model": ("opd", {"path": "teacher", "top_k": 4}, {}),
    "an average of the weights": ("sdft", {"top_k": 4}, {}),
    "adapters": ("sdft", {"top_k": 4}, {"model": {"lora": {"rank": 2}}}),
    "a falling weight, packed rows": (
        "kdrl",
        {"path": "teacher"},
        {"micro_batch_size": None, "max_tokens_per_micro_batch": 40},
    ),
    "whole distributions": ("sdft", {"top_k": None}, {}),
    "recomputed layers": ("sdpg", {"top_k": 4}, {"model": {"gradient_checkpointing": True}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_with_a_teacher_resumes_to_the_same_bits(name, task, taught, tmp_path) -> None:
    method, teacher, changes = SETTINGS[name]
    teacher = {**teacher, **({"path": str(taught)} if "path" in teacher else {})}
    model = {"path": str(task / "init"), "random_init": True, **changes.get("model", {})}
    fields = {"update_rate": 0.3} if method == "sdft" else {}
    run = {**changes, "model": model, "eval": {}, "steps": 4, "checkpoint_every": 2}
    run |= {"method": {"name": method, **fields}, "teacher": teacher}
    config = tiny_config(task, tmp_path / "whole", **run)
    whole = Trainer(config)
    save = whole.save
    whole.save = lambda: save() if whole.step < 4 else None  # as if killed after step 4
    whole.run()
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["teacher_loss"] > 0 for row in rows)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    resumed = Trainer(dataclasses.replace(config, out=str(tmp_path / "cut")))
    assert resumed.step == 2
    assert bool(resumed.teacher.average) == (method == "sdft")
    resumed.save = lambda: None
    resumed.run()
    assert metrics(tmp_path / "cut") == rows
    for ours, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_the_average_moves_only_after_an_update(task, tmp_path) -> None:
    teacher = {"self": True, "top_k": 4, "update_rate": 0.25}
    trainer = trainer_of(task, tmp_path, teacher, method="constant-alarm")
    names = [name for name, _ in trainer.gradients.forward.trainable()]
    start = {name: x.clone() for name, x in trainer.teacher.average.items()}
    assert list(start) == names
    trainer._sample()
    for (name, p), x in zip(trainer.policy.named_parameters(), start.values(), strict=True):
        assert torch.equal(p, x), name  # scoring has exchanged the weights twice
    take_steps(trainer, 1)
    for name, p in trainer.policy.named_parameters():
        expected = start[name] + 0.25 * (p - start[name])
        torch.testing.assert_close(trainer.teacher.average[name], expected, msg=name)


REFUSED = {
    "two teachers": ({"path": "other", "self": True}, "grpo", ["self", "'other'", "remove"]),
    "none for opd": ({}, "opd", ["teacher.path", "'opd'", "teacher.self=true"]),
    "a key of no teacher": ({"coef": 2.0}, "grpo", ["teacher.coef=2.0", "teacher.path"]),
    "a key of another loss": (
        {"self": True, "loss": "k2", "top_k": 8},
        "grpo",
        ["teacher.top_k=8", "reverse_kl"],
    ),
    "a rate of another model": (
        {"path": "other", "update_rate": 0.5},
        "grpo",
        ["teacher.update_rate=0.5", "self"],
    ),
    "k1, which has no gradient": ({"self": True, "loss": "k1"}, "grpo", ["loss='k1'", "k2"]),
    "a method without rollouts": ({"self": True}, "sft", ["teacher.self=true", "'sft'", "remove"]),
    "a loss of its own": ({"self": True}, "srft", ["teacher.self=true", "'srft'", "remove"]),
    "a third gradient": ({"path": "other"}, "mgda", ["teacher.path='other'", "'mgda'", "remove"]),
    "a loss that the method sets": (
        {"path": "other", "loss": "k3"},
        "kdrl",
        ["teacher.loss='k3'", "'k2'", "remove the key"],
    ),
    "a direction that the method sets": (
        {"loss": "k2"},
        "sdft",
        ["teacher.loss='k2'", "'forward_kl'", "method.kl_direction"],
    ),
    "a weight that the method sets": (
        {"path": "other", "coef": 0.5},
        "kdrl",
        ["teacher.coef=0.5", "method.coef"],
    ),
    "a negative weight": ({"self": True, "coef": -1}, "grpo", ["coef=-1", ">= 0"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_teacher_that_cannot_be_is_refused(name: str) -> None:
    teacher, method, parts = REFUSED[name]
    with pytest.raises(UserError) as error:
        load(TrainConfig, {"model": {"path": "x"}, "method": method, "teacher": teacher})
    assert all(part in str(error.value) for part in parts), error.value
    assert "\n" not in str(error.value)


def test_keys_of_the_loss_belong_to_the_teacher() -> None:
    for key, value in (("teacher_coef", 1.0), ("teacher_loss", "k3")):
        with pytest.raises(UserError, match=rf"loss\.{key}=.*: use teacher\.{key[8:]} instead"):
            load(TrainConfig, {"loss": {key: value}})


def test_an_average_in_bfloat16_is_refused() -> None:
    model = {"path": "x", "dtype": "bfloat16", "master_weights": False}
    for rate in (0.0, 1.0):
        load(TrainConfig, {"model": model, "teacher": {"self": True, "update_rate": rate}})
    with pytest.raises(UserError, match=r"master_weights=False: use true: .*update_rate=0.01"):
        load(TrainConfig, {"model": model, "teacher": {"self": True, "update_rate": 0.01}})


def test_another_tokenizer_or_vocabulary_is_refused_before_any_model(
    task, taught, tmp_path, monkeypatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("eval: {}\n")
    other = shutil.copytree(taught, tmp_path / "other")
    saved = json.loads((other / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(saved))
    wrong = rf"^teacher.path='{other}': .*token \d+ is {second!r}, and {first!r} in the policy"

    def settings(path: Path, **keys) -> list[str]:
        named = {
            "model.path": task / "init",
            "model.random_init": "true",
            "data.prompts": task / "prompts.jsonl",
            "data.demos": task / "demos.jsonl",
            "reward": "tests.tiny:digit_reward",
            "out": tmp_path / "out",
            "teacher.path": path,
            **keys,
        }
        return [f"{key}={value}" for key, value in named.items()]

    with pytest.raises(ConfigError, match=wrong):
        load_checked("gac.train_config:TrainConfig", file, settings(other))
    _, passed = load_checked("gac.train_config:TrainConfig", file, settings(taught))
    assert f"teacher.path: {taught}, with the policy's tokenizer" in passed
    monkeypatch.setattr("gac.training.policy.make_model", None)
    with pytest.raises(ConfigError, match=wrong):
        trainer_of(task, tmp_path / "a", {"path": str(other), "top_k": 4})
    with pytest.raises(
        ConfigError, match=r"^teacher.top_k=32: the vocabulary of .* has \d+ tokens"
    ):
        trainer_of(task, tmp_path / "b", {"path": str(taught)})
    small = json.loads((taught / "config.json").read_text())
    less = shutil.copytree(taught, tmp_path / "less")
    (less / "config.json").write_text(json.dumps(small | {"vocab_size": small["vocab_size"] - 1}))
    with pytest.raises(ConfigError, match=r"^teacher.top_k=null: the vocabulary of .* use a num"):
        trainer_of(task, tmp_path / "e", {"path": str(less), "top_k": None})
    with pytest.raises(ConfigError, match="^teacher.path='nowhere/at/all': no such folder"):
        trainer_of(task, tmp_path / "c", {"path": "nowhere/at/all", "top_k": 4})
    with pytest.raises(ConfigError, match="^data.demo_field=null: teacher.self=true needs demo"):
        data = {"prompts": str(task / "prompts.jsonl"), "demo_field": None}
        trainer_of(task, tmp_path / "d", SELF, data=data)
