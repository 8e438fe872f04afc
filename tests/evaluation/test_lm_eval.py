"""lm-evaluation-harness with our graders agrees with `gac eval` on the same rows.

Optional: needs the extra `lm-eval`.
"""

import gzip
import itertools
import json
import operator
import random
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gac import cli
from gac.config import load
from gac.data import read_rows
from gac.demo.real_task import sums
from gac.evaluation.config import EvalConfig
from gac.evaluation.suite import read_samples, run_suite
from gac.training.trainer import train
from tests.tiny import tiny_config, write_bpe_model

lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval (optional)")
TASKS = Path(__file__).parents[2] / "examples" / "lm_eval"
FILES = Path(__file__).parents[2] / "examples" / "eval"
SOURCES = {
    "gsm8k": "gsm8k_test.jsonl.gz",
    "mbpp": "mbpp.jsonl.gz",
    "mmlu_pro": "mmlu_pro.jsonl.gz",
    "bbh": "bbh_logic.jsonl.gz",
    "humaneval": "humaneval.jsonl.gz",
}
GREEDY = {
    "humaneval": (
        "tasks.humaneval.samples=1",
        "tasks.humaneval.temperature=0",
        "tasks.humaneval.pass_at=[1]",
    )
}
SPLITS = {"mmlu_pro": "category", "bbh": "task"}  # the field by which accuracy is split
LENGTH = 8  # maximum number of tokens in a response
ROOM = 24  # the same for responses that end


@pytest.fixture(scope="module")
def rows(data_dir) -> dict[str, list[Mapping[str, Any]]]:
    """Four test rows of each evaluation config: the first ones, of different splits."""
    some = {}
    for name, source in SOURCES.items():
        found = (row.fields for row in read_rows(str(data_dir / source)))
        wanted = (
            row
            for row in found
            if row.get("split", "test") == "test" and (name != "bbh" or row.get("choices"))
        )
        field = SPLITS.get(name, "id")
        groups = (next(rows) for _, rows in itertools.groupby(wanted, operator.itemgetter(field)))
        some[name] = list(itertools.islice(groups, 4))
        assert len({row[field] for row in some[name]}) == 4
    return some


@pytest.fixture(scope="module")
def model(rows, task, tmp_path_factory) -> Path:
    """The model exported by `gac export` after a one-step run."""
    folder = tmp_path_factory.mktemp("model")
    write_bpe_model(folder / "init", [row["prompt"] for part in rows.values() for row in part])
    start = {"path": str(folder / "init"), "random_init": True}
    train(tiny_config(task, folder / "run", steps=1, eval={}, model=start))
    assert cli.main(["export", str(folder / "run"), str(folder / "exported")]) == cli.OK
    return folder / "exported"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(dict(row)) + "\n" for row in rows)
    return path


def ours(
    name: str, model: Path, file: Path, *changes: str, chat: bool = False, length: int = LENGTH
) -> dict[str, tuple[str, float]]:
    """Run `gac eval`; return row id -> (response, score)."""
    out = file.with_suffix(".out")
    config = load(
        EvalConfig,
        FILES / f"{name}.yaml",
        [
            f"out={out}",
            f"model.path={model}",
            "model.dtype=float32",
            f"tasks.{name}.data.prompts={file}",
            f"tasks.{name}.data.chat={str(chat).lower()}",
            f"tasks.{name}.max_completion_length={length}",
            *GREEDY.get(name, ()),
            *changes,
        ],
    )
    run_suite(replace(config, tasks={name: config.tasks[name]}))
    return {a.id: (a.response, a.score) for a in read_samples(out)[name]}


def theirs(
    name: str,
    model: Path,
    file: Path,
    changes: Mapping[str, str] | None = None,
    *,
    chat: bool = False,
    length: int = LENGTH,
) -> dict[str, tuple[str, float]]:
    """Like `ours`, with lm_eval. changes: old text -> new text in the task file."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = file.with_suffix(".tasks")
    shutil.copytree(TASKS, folder)
    text = (folder / f"gac_{name}.yaml").read_text()
    text = re.sub(r"max_gen_toks: \d+", f"max_gen_toks: {length}", text)
    for old, new in {SOURCES[name]: str(file), **(changes or {})}.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / f"gac_{name}.yaml").write_text(text)
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=1),
        tasks=[f"gac_{name}"],
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=chat,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    samples = results["samples"][f"gac_{name}"]
    mean = sum(s["score"] for s in samples) / len(samples)
    assert results["results"][f"gac_{name}"]["score,none"] == pytest.approx(mean)
    return {s["doc"]["id"]: (s["resps"][0][0], s["score"]) for s in samples}


@pytest.mark.parametrize("name", SOURCES)
def test_responses_and_scores_match_on_real_rows(name, model, rows, tmp_path):
    file = write(tmp_path / SOURCES[name], rows[name])
    own = ours(name, model, file)
    assert len(own) == 4
    assert all(text for text, _ in own.values())
    assert theirs(name, model, file) == own


def test_scores_match_when_some_answers_are_correct(model, rows, tmp_path):
    """The answer of every second row is set to the model's own response, which it ends itself.

    A token that the model repeats becomes the end of a turn.
    """
    from transformers import AutoTokenizer

    file = write(tmp_path / "asked.jsonl.gz", rows["gsm8k"])
    ending = Path(shutil.copytree(model, tmp_path / "ending"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    own = ours("gsm8k", model, file, length=ROOM)
    last = Counter(tokenizer(text)["input_ids"][-1] for text, _ in own.values())
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(last.most_common(1)[0][0])
    tokenizer.save_pretrained(ending)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((ending / name).read_text())
        (ending / name).write_text(json.dumps({**settings, "eos_token_id": tokenizer.eos_token_id}))
    file = write(tmp_path / "again.jsonl.gz", rows["gsm8k"])
    responses = ours("gsm8k", ending, file, length=ROOM)
    answers = read_samples(file.with_suffix(".out"))["gsm8k"]
    # the harness does not tell a grader which answers are cut off
    ended = {answer.id for answer in answers if not answer.truncated}
    wanted = [
        {**row, "answer": responses[row["id"]][0] if i % 2 else "something else"}
        for i, row in enumerate(row for row in rows["gsm8k"] if row["id"] in ended)
    ]
    file = write(tmp_path / "wanted.jsonl.gz", wanted)
    own = ours("gsm8k", ending, file, "reward=exact", length=ROOM)
    assert {score for _, score in own.values()} == {0, 1}
    changes = {"gac_grader.math": "gac_grader.exact"}
    assert theirs("gsm8k", ending, file, changes, length=ROOM) == own


@pytest.mark.real
@pytest.mark.parametrize("name", SOURCES)
def test_the_pretrained_model_gives_the_same_answers(name, real_model, rows, tmp_path):
    """With its chat template; GAC answers all prompts in one batch, lm_eval one by one."""
    file = write(tmp_path / SOURCES[name], rows[name])
    options = {"chat": True, "length": 24}
    own = ours(name, real_model, file, **options)
    assert len({text for text, _ in own.values()}) == 4
    assert theirs(name, real_model, file, **options) == own


@pytest.mark.real
def test_the_pretrained_model_gets_the_same_scores(real_model, tmp_path):
    """Questions that it answers with a number and the end of its turn, half of them correctly."""
    rows = [
        {"id": f"sum/{number}", "prompt": question["question"], "answer": question["answer"]}
        for number, question in enumerate(itertools.islice(sums(random.Random(0)), 12))
    ]
    file = write(tmp_path / "sums.jsonl.gz", rows)
    own = ours("gsm8k", real_model, file, "tasks.gsm8k.data.template=null", chat=True, length=32)
    assert {0, 1} <= {score for _, score in own.values()}
    prompt = "{{prompt}}\\nSolve it step by step. End with a line '#### ' and the number.\\n"
    changes = {prompt: "{{prompt}}"}
    assert theirs("gsm8k", real_model, file, changes, chat=True, length=32) == own
