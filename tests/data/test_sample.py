"""`limit` draws a seeded sample, with a share for each stratum."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gac.cli import main
from gac.data import DataConfig, DataError, load_demos, load_prompts
from gac.data.examples import load_references
from gac.data.sample import sample
from gac.demo.task import make_tokenizer
from gac.fields import check_effects
from tests.tiny import write_tiny

TASKS = ("add", "sort", "rest")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """60 rows of each of three tasks, one task after the other, and 3 rows of a fourth."""
    tasks = [task for task in TASKS for _ in range(60)] + ["rare"] * 3
    rows = [
        {"id": i, "prompt": "1", "answer": "2", "solution": "3", "task": task, "odd": i % 2}
        for i, task in enumerate(tasks)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def ids(path: str, **options: Any) -> list[int]:
    examples = load_prompts(DataConfig(prompts=path, **options), make_tokenizer())
    return [int(example.id) for example in examples]


def test_a_limit_is_a_seeded_sample_in_file_order(path: str) -> None:
    chosen = ids(path, limit=30)
    assert len(chosen) == 30
    assert chosen == sorted(chosen)
    assert chosen == ids(path, limit=30)
    assert chosen != ids(path, limit=30, limit_seed=1)
    assert {row // 60 for row in chosen} >= {0, 1, 2}  # not the first rows
    assert set(chosen) < set(ids(path, limit=31))
    assert ids(path, limit=1000) == list(range(183))
    even = ids(path, limit=50, where={"odd": 0})
    assert len(even) == 50
    assert {row % 2 for row in even} == {0}
    # the same rows wherever they are read
    config = DataConfig(prompts=path, limit=30)
    assert [int(e.id) for e in load_demos(config, make_tokenizer())] == chosen
    assert [int(e.id) for e, _ in load_references(config)] == chosen
    assert load_prompts(config, make_tokenizer()).dropped == {"not in the sample of limit=30": 153}


def test_each_stratum_has_its_share(path: str) -> None:
    def counts(limit: int, **options: Any) -> Counter[str]:
        config = DataConfig(prompts=path, limit=limit, stratify_field="task", **options)
        return Counter(e.extra["task"] for e in load_prompts(config, make_tokenizer()))

    for seed in range(3):
        assert counts(61, limit_seed=seed) == {"add": 20, "sort": 20, "rest": 20, "rare": 1}
        assert set(counts(4, limit_seed=seed).values()) == {1}
    assert counts(40, where={"task": ["add", "sort"]}) == {"add": 20, "sort": 20}
    with pytest.raises(DataError, match="line 1, field 'kind': is missing.*: set stratify_field"):
        ids(path, limit=3, stratify_field="kind")
    for name, value in (("stratify_field", "task"), ("limit_seed", 1)):
        with pytest.raises(ValueError, match=f"{name}.*limit"):
            check_effects(DataConfig(prompts=path, **{name: value}))


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 45), st.integers(0, 3))
def test_shares_differ_from_the_population_by_rounding(
    strata: list[str], size: int, seed: int
) -> None:
    chosen = sample(strata, size, seed)
    assert len(chosen) == min(size, len(strata))
    assert chosen <= sample(strata, size + 1, seed)
    counts, drawn = Counter(strata), Counter(strata[i] for i in chosen)
    for stratum, count in counts.items():
        share = count * len(chosen) / len(strata)
        assert abs(drawn[stratum] - share) < len(counts)
        assert drawn[stratum] > 0 or size < len(counts)


def test_every_row_is_as_likely() -> None:
    drawn = Counter(row for seed in range(4000) for row in sample(["a"] * 8, 2, seed))
    assert set(drawn) == set(range(8))
    assert max(drawn.values()) - min(drawn.values()) < 250  # 1000 each, deviation 27


@pytest.fixture
def check(tmp_path: Path, capsys: Any) -> Callable[..., list[str]]:
    """The lines that `gac check` prints for the tiny task, with more keys."""
    folder = write_tiny(tmp_path, prompts=8, demos=8)
    keys = [f"model.path={folder / 'init'}", f"data.prompts={folder / 'prompts.jsonl'}"]
    keys += [f"eval.data.prompts={folder / 'eval.jsonl'}", f"out={tmp_path / 'run'}"]
    keys += ["method=grpo", "reward=exact", "model.random_init=true"]
    (tmp_path / "run.yaml").write_text("steps: 2\n")

    def lines(*more: str) -> list[str]:
        sets = [word for key in (*keys, *more) for word in ("--set", key)]
        status = main(["check", str(tmp_path / "run.yaml"), *sets])
        printed = capsys.readouterr()
        return (printed.out if status == 0 else printed.err).splitlines()

    return lines


def test_check_counts_the_rows_that_are_used(
    tmp_path: Path, check: Callable[..., list[str]]
) -> None:
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    ((op, passing),) = Counter(row["op"] for row in rows).most_common(1)

    def used(*keys: str) -> str:
        (line,) = (x for x in check(*keys) if x.startswith("eval.data.prompts: "))
        return line.removeprefix("eval.data.prompts: ")

    assert used() == f"{len(rows)} rows"
    assert used("eval.data.limit=2") == f"2 rows of {len(rows)} (by limit)"
    assert used("eval.data.limit=1000") == f"{len(rows)} rows"
    where = f"eval.data.where={{op: '{op}'}}"
    assert used(where) == f"{passing} rows of {len(rows)} (by where)"
    assert used(where, "eval.data.limit=1") == f"1 rows of {len(rows)} (by where and limit)"


def test_check_says_whether_the_chat_template_is_used(
    tmp_path: Path, check: Callable[..., list[str]]
) -> None:
    def said(*keys: str) -> list[str]:
        return [line for line in check(*keys) if "data.chat" in line]

    (line,) = said()
    assert "are used as they are: the tokenizer has no chat template" in line
    (line,) = said("data.chat=true")
    assert "data.chat=true: the tokenizer has no chat template: set data.chat=false" in line
    (tmp_path / "init" / "chat_template.jinja").write_text("{{ messages }}")
    (line,) = said()
    assert "are formatted with the tokenizer's chat template; data.chat=false" in line
    first, second = said("eval.data.template={prompt}")
    assert first == line
    assert "because data.template is set" in second
    assert said("data.chat=true", "eval.data.chat=false") == []
    (tmp_path / "init" / "chat_template.jinja").unlink()
    file = tmp_path / "init" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{{ messages }}"}))
    assert said() == [line]
