"""Mistakes in the inputs of a run are found before any work."""

import logging
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from gac import cli
from gac.config import save
from gac.data import DataError, Example
from gac.demo.task import make_tokenizer
from gac.errors import ConfigError, MissingData, MissingExtra
from gac.evaluation.config import EvalConfig
from gac.models.config import ModelConfig
from gac.rewards import Reward, RewardError, build_reward
from gac.rollouts.config import VLLMConfig
from gac.training.check import is_evaluation, load_checked
from gac.training.startup import check_positions, check_tokens
from gac.training.trainer import Trainer
from tests.tiny import tiny_config

EXAMPLE = Example("row 1", (1,), "what?", None, None, {})


def model_with(task, tmp_path, **changes):
    """The tiny model with changed keys of its configuration."""
    config = AutoConfig.from_pretrained(task / "init")
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return {"path": str(tmp_path / "model"), "random_init": True}


@pytest.mark.parametrize(("size", "key"), [(17, "path"), (8, "tokenizer")])
def test_tokens_beyond_the_embedding(task, tmp_path, size, key):
    model = model_with(task, tmp_path, vocab_size=size)
    model[key] = folder = model["path"] if key == "path" else str(task / "init")
    message = f"^model.{key}='{folder}': the tokenizer encodes .* as 17, but .* only {size} rows"
    with pytest.raises(ConfigError, match=message):
        Trainer(tiny_config(task, tmp_path / "run", model=model))


@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
def test_special_tokens_beyond_the_embedding(task, name):
    tokenizer, config = make_tokenizer(), ModelConfig(path=str(task / "init"))
    check_tokens(config, tokenizer, [])
    tokenizer.add_special_tokens({name: "<new>"})
    with pytest.raises(ConfigError, match="the tokenizer encodes '<new>' as 18, but .* 18 rows"):
        check_tokens(config, tokenizer, [])


def test_tokens_of_the_evaluation_beyond_the_embedding(task, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    model, data = model_with(task, tmp_path, vocab_size=15), {"prompts": f"{tmp_path}/rows.jsonl"}
    with pytest.raises(ConfigError, match="the tokenizer encodes .* has only 15 rows"):
        Trainer(tiny_config(task, tmp_path / "run", model=model, data=data, method="grpo"))


@pytest.mark.parametrize("where", ["", "eval: ", "eval.tasks.a: "])
def test_stop_strings_are_checked_before_the_model_is_loaded(task, tmp_path, where):
    two = {"data": {"prompts": str(task / "eval.jsonl")}, "stop": ["12"]}
    changed = {"": {"rollouts": {"stop": ["12"]}}, "eval: ": {"eval": two}}
    changes = changed.get(where, {"eval": {"tasks": {"a": two}}})
    with pytest.raises(ConfigError, match=f"^{where}stop='12' is 2 tokens"):  # without weights
        Trainer(tiny_config(task, tmp_path, model={"path": str(task / "init")}, **changes))


def test_rows_beyond_the_positions(task, tmp_path, caplog):
    model = model_with(task, tmp_path, max_position_embeddings=8)
    evaluated = {"data": {"prompts": str(task / "demos.jsonl")}, "max_completion_length": 5}
    evaluated["tasks"] = {"more": dict(evaluated)}
    with caplog.at_level(logging.WARNING):
        Trainer(tiny_config(task, tmp_path / "run", model=model, eval=evaluated))
    for key in ("eval", "eval.tasks.more"):  # prompts of 10 tokens
        assert f"tokens: lower {key}.max_completion_length, unless" in caplog.text
    assert caplog.text.count("8 positions, but a prompt with its response may have 15 tokens") == 2


def test_rows_beyond_learned_positions(tmp_path):
    AutoConfig.for_model("gpt2", n_positions=1).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    check_positions(config, 1, "this.key")
    with pytest.raises(ConfigError, match="1 positions, but .* 2 tokens: lower this.key"):
        check_positions(config, 2, "this.key")


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("mamba", {}),
        ("gpt2", {"n_positions": 0}),
        ("falcon", {"max_position_embeddings": 8, "alibi": True}),
    ],
)
def test_models_without_a_number_of_positions(tmp_path, caplog, kind, keys):
    AutoConfig.for_model(kind, **keys).save_pretrained(tmp_path)
    check_positions(ModelConfig(path=str(tmp_path)), 9, "this.key")
    assert not caplog.messages


def check(task, tmp_path, **changes):
    """What `gac check` prints of a run with changed settings, up to the size of its steps.

    Without what it says about the chat template.
    """
    save(tiny_config(task, tmp_path / "run", **changes), tmp_path / "run.yaml")
    lines = load_checked("gac.train_config:TrainConfig", tmp_path / "run.yaml", ())[1][:-1]
    return [line for line in lines if not line.startswith("data.chat=null: ")]


def only_answers(completion, example):
    return float({example.answer: 1}[completion])


def test_paths_with_variables(monkeypatch):
    for name, value in (("HOME", "/home"), ("NAME", "x")):
        monkeypatch.setenv(name, value)
    config = tiny_config(Path("~/$NAME"), Path("~/$NAME/run"))
    paths = config.out, config.model.path, VLLMConfig(folder="~/$NAME").folder
    assert paths == ("/home/x/run", "/home/x/init", "/home/x")
    assert EvalConfig(out="~").out == "/home"


def test_what_is_checked_without_the_model(task, tmp_path, monkeypatch):
    monkeypatch.setenv("TASK", str(task))
    evaluated = {"prompts": "$TASK/eval.jsonl"}
    (tmp_path / "many.jsonl").write_text('{"solution": "1"}\n' * 10_001)
    data = {
        "sources": [
            {"path": path}  # a folder has no rows
            for path in ("$TASK/prompts.jsonl", "$TASK/eval.jsonl", "$TASK/init:train")
        ],
        "demos": f"{tmp_path}/many.jsonl",
    }
    answered = {"prompts": "$TASK/prompts.jsonl"}  # with demonstrations, which are no answers
    tasks, closed = {"more": {"data": answered, "reward": f"{__name__}:only_answers"}}, []
    monkeypatch.setattr(Reward, "close", lambda reward: closed.append(reward))
    assert check(task, tmp_path, data=data, eval={"data": evaluated, "tasks": tasks}) == [
        f"model.path: {task / 'init'}",
        "data.demos: 10000 rows",
        "data.sources[0].path: 16 rows",
        "data.sources[1].path: 8 rows",
        "data.sources[2].path: the folder '$TASK/init:train' exists; its rows were not read",
        "reward: 0.5 for the demonstration of the first row",
        "eval.data.prompts: 8 rows",
        "eval.tasks.more.data.prompts: 16 rows",
    ]
    assert len(closed) == 3  # the rewards of `data`, `eval` and the task
    with pytest.raises(ConfigError, match=r"^eval\.tasks\.data\.reward: unknown reward 'mth'"):
        check(task, tmp_path, eval={"tasks": {"data": {"data": evaluated, "reward": "mth"}}})


@pytest.mark.parametrize(
    ("method", "missing", "line"),
    [
        ("sft", "answer_field", "reward: 0.5 for the demonstration of the first row"),
        ("grpo", "demo_field", "reward: imported, not run: the first row has no demonstration"),
    ],
)
def test_the_first_row_needs_only_what_the_method_needs(
    task, tmp_path, caplog, method, missing, line
):
    demos = str(task / "demos.jsonl")
    data = {"prompts": str(task / "prompts.jsonl"), "demos": demos}
    late = {"name": "sft-then-rl", "sft_steps": 3}
    assert check(task, tmp_path, data=data | {missing: "gold"}, method=method, eval={})[-1] == line
    data |= {"answer_field": "gold", "demos": None}
    with pytest.raises(DataError, match="set answer_field"):  # rollouts in the last step
        check(task, tmp_path, data=data, method=late, eval={})
    check(task, tmp_path, data=data, method=late | {"sft_steps": 4}, eval={})  # after it
    data["prompts"] = None
    assert check(task, tmp_path, data=data | {"demos": demos}, method="sft", eval={})[1:] == [
        "data.demos: 12 rows"
    ]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        ({}, "0.016"),  # 4 bytes for the weight, its gradient and the two moments
        ({"dtype": "bfloat16"}, "0.016"),
        ({"dtype": "bfloat16", "master_weights": False}, "0.008"),
        ({"lora": {"rank": 2}}, "0.004"),
        ({"dtype": "bfloat16", "lora": {"rank": 2}}, "0.002"),
    ],
)
def test_the_memory_of_a_million_weights(task, tmp_path, model, gigabytes):
    header, model = b'{"x": {"shape": [1000, 1000]}}', model_with(task, tmp_path) | model
    (tmp_path / "model" / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header
    )
    assert (
        f": 1 million parameters; training takes {gigabytes} GB for"
        in check(task, tmp_path, model=model)[0]
    )


@pytest.mark.parametrize(
    ("package", "changes", "purpose"),
    [
        ("transformers", {}, "this command"),
        ("peft", {"model": {"path": "bare", "random_init": True, "lora": {}}}, "model.lora"),
        ("trl", {"rollouts": {"engine": "vllm"}}, "rollouts.engine=vllm"),
        ("datasets", {"data": {"prompts": "a/b:train"}}, "data.prompts='a/b:train'"),
    ],
)
def test_missing_packages_are_named_before_the_model_is_loaded(
    task, tmp_path, monkeypatch, package, changes, purpose
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=f"^{purpose} needs the extra"):
        check(task, tmp_path, **changes)


@pytest.mark.parametrize(("rank", "warmup", "count"), [(0, 5, 2), (0, 4, 1), (1, 5, 0)])
def test_rank_0_warns_of_what_makes_no_sense(
    task, tmp_path, monkeypatch, caplog, rank, warmup, count
):
    """Warmup beyond the last step, and evaluation of the training prompts."""
    monkeypatch.setenv("RANK", str(rank))
    check(
        task,
        tmp_path,
        optim={"warmup_steps": warmup},
        eval={"data": {"prompts": str(task / "prompts.jsonl")}},
    )
    assert len(caplog.messages) == count


@pytest.mark.parametrize(
    ("folder", "advice"), [("a/b", "run the command in"), ("a/b/c", "and not a dataset")]
)
def test_paths_that_exist_near_the_configuration(task, tmp_path, folder, advice):
    shutil.copy(task / "prompts.jsonl", tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(MissingData, match=f"^data.prompts='prompts.jsonl': .*{advice}"):
        check(task, tmp_path / folder, data={"prompts": "prompts.jsonl"})


REWARD = """\
def equal(completion, example):
    return 1.0

def broken(completion, example):
    return 1 / 0
"""


def test_a_reward_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "rw.py").write_text(REWARD)
    assert build_reward(f"{tmp_path}/rw.py:equal")([""], [EXAMPLE]) == [1.0]
    with pytest.raises(ValueError, match=r"no file '\./rw\.py' in this folder or next to"):
        build_reward("./rw.py:equal")
    monkeypatch.syspath_prepend(str(tmp_path))  # as `gac train FOLDER/run.yaml` does
    assert build_reward("./rw.py:equal")([""], [EXAMPLE]) == [1.0]
    with pytest.raises(
        RewardError, match=r"ZeroDivisionError: division by zero \(.*rw\.py, line 5"
    ):
        build_reward("rw.py:broken")([""], [EXAMPLE])
    (tmp_path / "bad.py").write_text("x = 1\ny = missing\n")
    with pytest.raises(ValueError, match=r"NameError: .*bad\.py, line 2"):
        build_reward("./bad.py:equal")


def test_evaluation_files_are_checked(task, tmp_path, capsys):
    """One with `tasks`, and one with a single task that is given in the command."""
    file = tmp_path / "eval.yaml"
    head = f"model: {{path: {task / 'init'}, random_init: true}}\nreward: tests.tiny:digit_reward\n"
    data = f"data: {{prompts: {task / 'eval.jsonl'}}}"
    file.write_text(f"{head}tasks: {{a: {{{data}}}}}\n")
    assert cli.main(["check", str(file)]) == cli.OK
    text = capsys.readouterr().out
    assert "\ntasks.a.data.prompts: 8 rows\n" in text
    assert text.endswith("\nAll checks passed.\n")
    file.write_text(f"{head}eval: {{{data}, max_completion_length: 0}}\n")
    assert cli.main(["check", str(file)]) == cli.USAGE
    assert "max_completion_length=0" in capsys.readouterr().err
    assert cli.main(["check", str(file), "--set", "eval.max_completion_length=5"]) == cli.OK
    assert "\neval.data.prompts: 8 rows" in capsys.readouterr().out
    # a typo is that of an evaluation file
    file.write_text(f"{head}sed: 1\ntasks: {{a: {{{data}}}}}\n")
    assert cli.main(["check", str(file)]) == cli.USAGE
    assert "did you mean 'seed'" in capsys.readouterr().err
    for key in ("data.prompts", "method"):  # of a training run
        assert not is_evaluation(file, [f"{key}=x"])


def test_what_was_not_read_is_said(task, tmp_path):
    """Nobody asks the Hub whether a dataset exists before a run."""
    lines = check(task, tmp_path, data={"prompts": "nobody/nothing-of-this-name:train"})
    (line,) = [line for line in lines if line.startswith("data.prompts: ")]
    assert "'nobody/nothing-of-this-name:train'" in line
    assert "the Hub was not queried, and no row was read" in line
