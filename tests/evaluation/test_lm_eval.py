"""lm-evaluation-harness with our graders agrees with `gac eval` on the same rows.

Optional: needs lm_eval, e.g. `pip install lm_eval==0.4.13`.
"""

import gzip
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gac import cli
from gac.config import load
from gac.data import read_rows
from gac.evaluation.config import EvalConfig
from gac.evaluation.suite import read_samples, run_suite
from gac.training.trainer import train
from tests.tiny import tiny_config, write_bpe_model

lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval (optional)")
TASKS = Path(__file__).parents[2] / "examples" / "lm_eval"
FILES = Path(__file__).parents[2] / "examples" / "eval"
SOURCES = {"gsm8k": "gsm8k_test.jsonl.gz", "mbpp": "mbpp.jsonl.gz"}
LENGTH = 8  # maximum number of tokens in a response


@pytest.fixture(scope="module")
def rows(data_dir) -> dict[str, list[Mapping[str, Any]]]:
    """The first four test rows of each evaluation config."""
    some = {}
    for name, source in SOURCES.items():
        found = (row.fields for row in read_rows(str(data_dir / source)))
        test_rows = (row for row in found if row.get("split", "test") == "test")
        some[name] = list(itertools.islice(test_rows, 4))
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
            *changes,
        ],
    )
    run_suite(config)
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
    limit = {"max_gen_toks: 512": f"max_gen_toks: {length}"}
    for old, new in {SOURCES[name]: str(file), **limit, **(changes or {})}.items():
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
    """The answer of every second row is set to the model's own response."""
    responses = ours("gsm8k", model, write(tmp_path / "asked.jsonl.gz", rows["gsm8k"]))
    wanted = [
        {**row, "answer": responses[row["id"]][0] if i % 2 else "something else"}
        for i, row in enumerate(rows["gsm8k"])
    ]
    file = write(tmp_path / "wanted.jsonl.gz", wanted)
    own = ours("gsm8k", model, file, "reward=exact")
    assert [score for _, score in own.values()] == [0, 1, 0, 1]
    assert theirs("gsm8k", model, file, {"gac_grader.math": "gac_grader.exact"}) == own


@pytest.mark.real
@pytest.mark.parametrize("name", SOURCES)
def test_the_pretrained_model_gives_the_same_answers(name, real_model, rows, tmp_path):
    """With its chat template; GAC answers all prompts in one batch, lm_eval one by one."""
    file = write(tmp_path / SOURCES[name], rows[name])
    options = {"chat": True, "length": 24}
    own = ours(name, real_model, file, **options)
    assert len({text for text, _ in own.values()}) == 4
    assert theirs(name, real_model, file, **options) == own
