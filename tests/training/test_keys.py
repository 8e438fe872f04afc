"""Every key of the configuration changes what a run does, or is refused by name."""

import copy
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import typing
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gac.config import load
from gac.demo.task import make_tokenizer
from gac.errors import UserError
from gac.methods import DEFAULT, METHODS, Observation
from gac.models.config import LoraConfig
from gac.order import Order
from gac.rollouts import Rollout
from gac.train_config import TrainConfig, loss_of
from gac.training.trainer import Trainer
from tests.tiny import metrics, write_tiny

HERE = __name__
SAMPLED = {"eval.samples": 2, "eval.temperature": 1}
DATA: dict[str, Any] = {  # of data.* and of eval.data.*
    "sources": [{"path": "prompts.jsonl", "name": "a"}, {"path": "eval.jsonl", "name": "b"}],
    "order": f"{HERE}:Backwards",
    "prompts": "demos.jsonl",
    "demos": "eval.jsonl",
    "prompt_field": "other",
    "answer_field": "other",
    "answer_pattern": "^(.)",
    "demo_field": "other",
    "id_field": "op",
    "source_field": "op",
    "choices_field": "options",
    "where": {"op": "-"},
    "template": "{prompt}=",
    "demo_template": "{demo}0",
    "system": "1",
    "max_prompt_tokens": 9,
    "max_demo_tokens": 8,
    "limit": 3,
    "stratify_field": "op",
}
VALUES: dict[str, Any] = {  # of the keys whose type does not suggest another value
    **{f"data.{key}": value for key, value in DATA.items()},
    **{f"eval.data.{key}": value for key, value in DATA.items()},
    "run_name": "other",
    "model.path": "other",
    "model.tokenizer": "other",
    "model.dtype": "bfloat16",
    "model.attention": "eager",
    "model.lora": {"rank": 2},
    "model.lora.target_modules": ["q_proj"],
    "reward": "exact",
    "rollouts.stop": [*"0123456789"],
    "rollouts.generation_batch_tokens": 40,
    "rollouts.function": f"{HERE}:two_tokens",
    "rollouts.engine": "paged",
    "rollouts.vllm.urls": ["http://127.0.0.1:1"],
    "rollouts.vllm.model": "other",
    "rollouts.vllm.weights": "nccl",
    "rollouts.vllm.folder": "other",
    "rollouts.correction": "token_truncate",
    "rollouts.scale_rewards": "centered",
    "rollouts.overlong_tokens": 4,
    "rollouts.num_iterations": 1,
    "rollouts.log_samples_every": 0,
    "rollouts.log_sample_prompts": 1,
    "loss.dual_clip": 1.01,
    "loss.kl_estimator": "k1",
    "loss.demo_weight": "trust",
    "loss.rollout_reduction": "sum",
    "loss.demo_reduction": "sum",
    "loss.policy_loss": "cispo",
    "loss.sapo_tau": [2.0, 3.0],
    "loss.importance_sampling_level": "sequence",
    "loss.correction": "token_mask",
    "loss.correction_min": 0.9,
    "loss.teacher_loss": "k3",
    "teacher.path": "taught",
    "teacher.update_rate": 0.5,
    "teacher.loss": "forward_kl",
    "teacher.top_k": 5,
    "optim.schedule": "constant",
    "optim.betas": [0.5, 0.5],
    "max_tokens_per_micro_batch": 40,
    "packing": False,
    "eval.reward": "exact",
    "eval.stop": [*"0123456789"],
    "eval.split_field": "op",
    "eval.function": f"{HERE}:two_tokens",
    "eval.pass_at": [2],
    "eval.tasks": {"more": {"data": {"prompts": "eval.jsonl"}, "max_completion_length": 2}},
    "eval.every": 1,
    "guards.skip_above_norm": 1e-9,
    "budget_tokens": 1,
    "parallel.mode": "fsdp",
    "report_to": ["tensorboard"],
    "project": "other",
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "guards.patience": 1,
    "guards.max_saved_steps": 0,
    "method.low.valley": 0.5,
    "method.low.decay": 1,
    "method.alarm.source_steps": 0,
    "method.alarm.warmup": 20,
}
TAUGHT = {"teacher.path": "init", "teacher.top_k": 4}
WITH: dict[str, dict[str, Any]] = {  # other keys that a key needs to have an effect
    "model.master_weights": {"model.dtype": "bfloat16"},
    **{f"model.lora.{f.name}": {"model.lora": {"rank": 2}} for f in dataclasses.fields(LoraConfig)},
    "data.choices_field": {"data.template": "{prompt}{options}"},
    "data.chat": {"model.tokenizer": "other"},
    "data.system": {"model.tokenizer": "other", "data.chat": True},
    "data.limit_seed": {"data.limit": 3},
    "data.stratify_field": {"data.limit": 4, "data.limit_seed": 1},
    "rollouts.correction": {"rollouts.function": f"{HERE}:echo"},
    "rollouts.correction_max": {
        "rollouts.function": f"{HERE}:echo",
        "rollouts.correction": "token_truncate",
    },
    "rollouts.overlong_penalty": {"rollouts.overlong_tokens": 4},
    **{f"loss.{key}": {"loss.kl_coef": 0.1} for key in ("kl_estimator", "use_bias_correction_kl")},
    "loss.demo_shape": {"method": {"name": "constant-alarm", "weight": "shaped"}},
    "loss.sapo_tau": {"loss.policy_loss": "sapo"},
    "loss.max_tokens": {"loss.rollout_reduction": "constant", "loss.max_tokens": 9},
    "teacher.path": TAUGHT,
    "teacher.self": TAUGHT,
    "teacher.update_rate": {"teacher.self": True, "teacher.top_k": 4},
    **dict.fromkeys(["teacher.loss", "teacher.top_k", "teacher.coef"], TAUGHT),
    "loss.correction_min": {"rollouts.function": f"{HERE}:echo"},
    "eval.data.choices_field": {
        "eval.data.template": "{prompt}{options}",
        "model.tokenizer": "other",
    },
    "eval.data.chat": {"model.tokenizer": "other"},
    "eval.data.system": {"model.tokenizer": "other", "eval.data.chat": True},
    "eval.data.limit_seed": {"eval.data.limit": 3},
    "eval.data.stratify_field": {"eval.data.limit": 4, "eval.data.limit_seed": 1},
    "eval.samples": {"eval.temperature": 1},
    "eval.top_p": SAMPLED,
    "eval.pass_at": SAMPLED,
    "project": {"report_to": ["tensorboard"]},
    "method.low.valley": {"method.low.decay": 1},
    "method.low.hold": {"method.low.decay": 1},
    "method.low.start": {"method.low.warmup": 2},
}
SAVED = {"checkpoint_every", "keep_checkpoints"}  # only runs with these keys write checkpoints
SKIPS = {"guards.skip_above_norm": 1e-9}
IN_RUN: dict[str, dict[str, Any]] = {  # keys that act only if something happens in the run
    "eval.every": {"rollouts.num_iterations": 1},  # at steps that sample new rollouts
    "checkpoint_every": {"rollouts.num_iterations": 1, "keep_checkpoints": 2},
    "keep_checkpoints": {"rollouts.num_iterations": 1, "checkpoint_every": 1},
    "export": {"keep_checkpoints": 2},
    "teacher.update_rate": {"rollouts.num_iterations": 1},  # the second step's teacher
    "rollouts.dynamic_sampling_retries": {
        "reward": "exact",
        "rollouts.num_generations": 3,
    },  # all are 0
    "kl_sample_size": {"monitor_kl_every": 1},
    "max_tokens_per_micro_batch": {"micro_batch_size": None},
    "packing": {"micro_batch_size": None, "max_tokens_per_micro_batch": 40},
    "loss.dual_clip": {"rollouts.num_generations": 6},
    "guards.patience": SKIPS,
    "guards.max_saved_steps": SKIPS,
}
EXCEPTIONS = {  # keys that need not act in this run, and why
    "out": "a path",
    "run_name": "the run's name in reports and trackers",
    "model.gradient_checkpointing": "less memory, equal results",
    "model.safetensors_only": "acts on models with pickled weights",
    "rollouts.print_samples": "writes to the terminal only",
    "eval.data.demo_field": "`gac rewards check` reads the reference solutions",
    "eval.data.id_field": "names rows in errors and in the answers of `gac eval`",
    "eval.batch": "less memory, equal results",
    "ignore_input_changes": "acts on resume",
    "parallel.allow_world_size_change": "acts on resume",
    "parallel.mode": "acts with several processes",
    "parallel.timeout": "acts when a process hangs",
}


def reward(completion: str, example: Any) -> float:
    """Differs between similar completions, and between answers; 0 for half of them."""
    return max(zlib.crc32(f"{completion} {example.answer}".encode()) % 200 - 100, 0) / 100


class Backwards(Order):
    """Rows from the last to the first."""

    def __init__(self, rows: Any, seed: int) -> None:
        super().__init__(len(rows), seed)

    def _permute(self, epoch: int) -> Any:
        return sorted(super()._permute(epoch), reverse=True)


def echo(prompts: Any, engine: Any) -> list[Rollout]:
    """The engine's completions, with log-probs that another engine might have given them."""
    return [
        Rollout(e.prompt, c, [1] * len(c), [-2.0 - 0.3 * i for i in range(len(c))])
        for e, c in zip(
            prompts, engine.generate([example.prompt for example in prompts]), strict=True
        )
    ]


def two_tokens(prompts: Any, engine: Any) -> list[Rollout]:
    """Completions of two tokens."""
    return [
        Rollout(e.prompt, c, [1] * len(c))
        for e, c in zip(
            prompts,
            engine.generate([e.prompt for e in prompts], max_completion_length=2),
            strict=True,
        )
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder: two models with weights, and rows with all fields."""
    folder = write_tiny(tmp_path_factory.mktemp("keys"), prompts=8, demos=8)
    for name in ("prompts.jsonl", "demos.jsonl", "eval.jsonl"):
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for i, row in enumerate(rows):
            row["prompt"] = row["prompt"][: 9 + i % 2]
            row |= {"solution": row["answer"][: 8 - i % 2], "other": row["prompt"][1:5]}
            row |= {"options": ["1", "2"], "choices": ["3", "4"]}
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text)
    (folder / "other.jsonl").write_text(text)
    shutil.copytree(folder / "init", folder / "taught")
    for name in ("init", "other", "taught"):
        config = AutoConfig.from_pretrained(folder / "init")
        config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
        config.attention_dropout, config.vocab_size = 0.1, 20  # the other tokenizer has 20 tokens
        config.hidden_size = {"init": 32, "other": 16, "taught": 8}[name]
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    tokenizer = make_tokenizer("9876543210+-=.'()")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}+{% endfor %}"
    tokenizer.save_pretrained(folder / "other")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


BASE = {
    "model.path": "init",
    "data.prompts": "prompts.jsonl",
    "data.demos": "demos.jsonl",
    "reward": f"{HERE}:reward",
    "rollouts.num_prompts": 3,
    "rollouts.num_generations": 2,
    "rollouts.max_completion_length": 5,
    "rollouts.num_iterations": 2,
    "optim.lr": 0.05,
    "optim.warmup_steps": 0,
    "steps": 2,
    "demo_batch_size": 2,
    "micro_batch_size": 3,
    "export": False,
}
EVAL = {"eval.data.prompts": "eval.jsonl", "eval.max_completion_length": 5}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration, or of a method, and their defaults."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        kinds = typing.get_args(hints[field.name])
        optional = [kind for kind in kinds if is_dataclass(kind) and type(None) in kinds]
        if not is_dataclass(value):
            yield key, value
        if key != "method" and (optional or is_dataclass(value)):
            yield from leaves(optional[0]() if optional else value, f"{key}.")


def other(key: str, value: Any) -> Any:
    """A value of the key that differs from the default."""
    if key in VALUES:
        return VALUES[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return 0.5 * value or 0.5 if isinstance(value, float) else 2


OUTCOMES: dict[str, Any] = {}


def config(keys: Mapping[str, Any], out: Path | str = "out") -> TrainConfig:
    nested: dict[str, Any] = {"out": str(out)}
    for key, value in keys.items():
        *parents, last = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = copy.deepcopy(value)
    return load(TrainConfig, nested)


def outcome(keys: Mapping[str, Any]) -> Any:
    """What a run with these keys did, or its error as text."""
    text = json.dumps(keys)
    if text not in OUTCOMES:
        out = Path("runs") / hashlib.md5(text.encode()).hexdigest()
        try:
            trainer = Trainer(config(keys, out))
            if not keys.keys() & SAVED:
                trainer.save = lambda: None  # saves a quarter of the time
            trainer.run()
        except UserError as error:
            OUTCOMES[text] = str(error)
        else:
            weights = [p.tolist() for p in trainer.policy.parameters()]
            lines = [
                json.loads(line)
                for line in "".join(
                    path.read_text()
                    for path in (out / "eval.jsonl", out / "samples.jsonl")
                    if path.exists()
                ).splitlines()
            ]
            evals = [{k: v for k, v in line.items() if "second" not in k} for line in lines]
            OUTCOMES[text] = [
                repr(metrics(out)),
                repr(weights),
                evals,
                sorted(str(p.relative_to(out)) for p in out.rglob("*") if "tfevents" not in p.name),
            ]
    return OUTCOMES[text]


def names(error: Any, keys: Iterable[str]) -> bool:
    """Whether an outcome is an error that names one of the keys by its last part."""
    return isinstance(error, str) and any(
        re.search(rf"\b{key.rpartition('.')[2]}\b", error) for key in keys
    )


def problem(key: str, keys: dict[str, Any], value: Any, needed: dict[str, Any]) -> str | None:
    """Why the key fails the test if it is added to `keys` and the `needed` ones, or None.

    A run without the key must succeed, unless another method than the default refuses a needed key.
    """
    run = {**keys, **needed}
    base, changed = outcome(run), outcome({**run, key: value})
    if isinstance(base, str):
        return (
            None
            if names(base, needed) and DEFAULT not in keys.values()
            else f"{key}: fails without it: {base}"
        )
    if isinstance(changed, str):
        return None if names(changed, [key]) else f"{key}: the error does not name it: {changed}"
    return f"{key}={value} has no effect" if changed == base else None


def test_corrections_compare_log_probs_of_the_same_distribution() -> None:
    """Rollouts from elsewhere have log-probs at temperature 1 without truncation."""
    elsewhere = {"rollouts.function": "a:b"}
    specs = [
        loss_of(config({"method.name": "grpo", **keys})).spec
        for keys in (
            elsewhere,
            {"rollouts.engine": "vllm", "rollouts.vllm.urls": ["http://a"]},
            {},
            elsewhere | {"rollouts.temperature": 0.7},
            elsewhere | {"rollouts.top_p": 0.9},
            elsewhere | {"method.name": "dpo"},
        )
    ]
    assert [(spec.correction, spec.correction_max) for spec in specs] == [
        *[("sequence_mask", 3.0)] * 2,
        *[("none", 2.0)] * 4,
    ]


KINDS = {  # a representative of each kind of method
    "constant-alarm": "the default: both terms, fused",
    "grpo": "rollouts only",
    "dpo": "pairs from the reference",
    "luffy": "the demonstration is in its prompt's group",
    "prefix-rft": "rollouts continue a demonstration; own token loss",
    "sdar": "a teacher; own token loss with the policy loss",
    "asft": "demonstrations only; own token loss with the reference's head",
    "mgda": "several gradients",
}
FULL = pytest.mark.full(reason="seconds each; the default and luffy read most keys")
REST = [kind for kind in KINDS if kind not in (DEFAULT, "luffy")]
OF_THE_ALARM = "method.alarm.", "method.mu_suspect"  # longer runs: the test below
OF_THE_METHOD = "rollouts.", "loss.", "kl_sample_size"  # the other keys are read by no method
OWN_SAMPLING = ("luffy", "prefix-rft", "sdar")  # the others sample as the default does, or not
OF_THE_ENGINE = ("engine", "paged", "vllm", "generation_batch", "log_")


@pytest.mark.slow(reason="hundreds of runs")
@pytest.mark.parametrize("method", [DEFAULT, "luffy", *(pytest.param(x, marks=FULL) for x in REST)])
def test_every_key_acts_or_is_refused(folder: Path, method: str) -> None:
    problems = []
    for key, default in leaves(TrainConfig()):
        if key in EXCEPTIONS or not (method == DEFAULT or key.startswith(OF_THE_METHOD)):
            continue
        if key.startswith("rollouts.") and method != DEFAULT:
            own = method in OWN_SAMPLING  # else ignored: a file compares methods
            if not own or key.removeprefix("rollouts.").startswith(OF_THE_ENGINE):
                continue
        keys = {"method": method, **BASE, **(EVAL if key.startswith("eval.") else {})}
        keys |= IN_RUN.get(key, {})
        needs = [WITH.get(key, {}), *([{}] if method == DEFAULT else [])]
        problems += [
            problem(key, keys, other(key, keys.get(key, default)), needed) for needed in needs
        ]
    assert not [*filter(None, problems)]


@pytest.mark.parametrize("method", KINDS)
def test_every_key_of_a_method_acts(folder: Path, method: str) -> None:
    keys = {"method.name": method, **BASE, "rollouts.num_iterations": 1}
    assert not [
        *filter(
            None,
            [
                problem(key, keys, other(key, default), WITH.get(key, {}))
                for key, default in leaves(METHODS[method](), "method.")
                if not key.startswith(OF_THE_ALARM)
            ],
        )
    ]


def test_every_key_of_the_alarm_acts() -> None:
    """On mu, in ten runs of 200 steps with demonstrations of three levels of loss."""

    def mus(**keys: Any) -> list[float]:
        method, draw, mus = config({**BASE, **keys}).method, random.Random(0), []
        for run in range(10):
            state, level = method.init(), 1.0
            for step in range(1, 201):
                if draw.random() < 0.2 * (run % 2) or step % 40 == 0:
                    level = draw.choice([1.0, 1.0, 1.2, 2.0])
                state, mix = method.mix(
                    state,
                    Observation(
                        step,
                        demo_losses=tuple(level * draw.lognormvariate(0, 0.05) for _ in range(6)),
                    ),
                )
                mus.append(mix.mu)
        return mus

    base = mus()
    keys = [
        pair for pair in leaves(METHODS[DEFAULT](), "method.") if pair[0].startswith(OF_THE_ALARM)
    ]
    assert len(keys) > 5
    assert not [key for key, value in keys if mus(**{key: other(key, value)}) == base]
