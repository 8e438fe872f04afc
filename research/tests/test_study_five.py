"""The fifth study: its tasks, the order of its data, its intervals and its page."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from gac.config import load
from gac.demo.task import make_tokenizer
from gac.errors import ConfigError
from gac.train_config import TrainConfig
from gac.training.feed import Feed
from research import study_results, study_run
from research.study_run import CONDITIONS, KINDS, Cell
from research.study_tasks import ALPHABET, TASKS, corrupt, play, restyle, reward


@pytest.mark.parametrize("name", KINDS)
def test_solutions_are_rewarded_in_both_styles_and_random_ones_hardly_ever(name):
    rng, task, hits = random.Random(0), KINDS[name], 0
    lengths = set()
    for _ in range(300):
        problem = task.problem(rng)
        lengths.add(len(problem.prompt))
        example = SimpleNamespace(
            answer=problem.solution, extra={"task": name, "prompt": problem.prompt}
        )
        assert len(problem.solution) <= task.response_tokens
        assert set(problem.prompt + restyle(problem.solution)) <= set(ALPHABET)
        assert reward(problem.solution, example) == reward(restyle(problem.solution), example) == 1
        assert reward(problem.solution[:-1], example) == 0
        hits += reward(corrupt(problem.solution, rng), example)
    assert len(lengths) == 1
    assert hits < 30


def test_planning_rejects_walls_and_edges():
    def score(moves: str) -> float:
        extra = {"task": "planning", "prompt": "kmlyz="}  # from (0, 0) to (2, 0), wall at (1, 0)
        return reward(moves, SimpleNamespace(answer="", extra=extra))

    assert score("DRRU") == 1
    assert score("RR") == score("UDRRU") == score("DRR") == 0


def test_the_tool_replies_to_what_is_asked_and_its_tokens_have_no_loss():
    """A model that repeats the solution, one that asks for something else, and one that stops."""
    tokenizer, problem = make_tokenizer(ALPHABET), KINDS["tool"].problem(random.Random(0))
    prompt = SimpleNamespace(
        prompt=(5,), answer=problem.solution, extra=study_run._row("tool", 0, problem)
    )
    scripts = iter([[problem.solution[:2], "+a", "<eos>"], [problem.solution[4:], "00"]])

    def generate(contexts, max_completion_length):
        return [tuple(tokenizer.encode(text)) for text in next(scripts)]

    rollouts = play([prompt] * 3, SimpleNamespace(tokenizer=tokenizer, generate=generate))
    texts = [tokenizer.decode(r.completion_ids, skip_special_tokens=True) for r in rollouts]
    assert texts == [problem.solution, f"+a#{problem.table[0]}00", ""]
    assert [r.loss_mask for r in rollouts] == [[1, 1, 0, 0, 1, 1]] * 2 + [[1]]
    assert [reward(text, prompt) for text in texts] == [1, 0, 0]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_run_visits_the_rows_in_the_order_of_generation(tmp_path, condition):
    cell, steps = Cell("sorting", "weak", condition, "", 3), 10
    study_run.write_data(tmp_path / "demos.jsonl", cell, 12, steps, cell.seed + 1, "demos")
    study_run.write_data(tmp_path / "prompts.jsonl", cell, 6, steps, cell.seed, "prompts")
    config = load(
        TrainConfig,
        {
            "data": {name: str(tmp_path / f"{name}.jsonl") for name in ("demos", "prompts")},
            "method": {"name": "constant"},
            "rollouts": {"num_prompts": 6},
            "demo_batch_size": 12,
            "steps": steps,
            "seed": cell.seed,
        },
    )
    tokenizer = make_tokenizer(ALPHABET)
    feed = Feed(config, tokenizer, 0, 1)
    prompts, bad = [], []
    for step in range(steps):
        prompts += [int(example.id) for example in feed.examples(step)]
        texts = [
            tokenizer.decode(row.ids, skip_special_tokens=True) for row in feed.demo_rows(step)
        ]
        pairs = [text.split("=") for text in texts]
        sums = [restyle("".join(sorted(prompt))) for prompt, _ in pairs]
        bad.append(sum(restyle(demo) != s for (_, demo), s in zip(pairs, sums, strict=True)))
    assert prompts == list(range(6 * steps))
    if condition == "good-then-bad":
        assert bad[:4] == [0] * 4
        assert min(bad[4:]) >= 11
    elif condition == "partly-wrong":
        assert 40 < sum(bad) < 80
    else:
        assert sum(bad) == 0


def test_interval_resamples_tasks_and_then_seeds():
    rng = np.random.default_rng(1)
    tasks, seeds = rng.normal(size=(5, 1)), rng.normal(size=(5, 5))
    low, high = study_results.interval(3 * tasks + 0.0 * seeds)
    draws = 3 * tasks[rng.integers(5, size=(20_000, 5)), 0].mean(1)
    assert np.allclose([low, high], np.percentile(draws, [2.5, 97.5]), atol=0.25)
    assert study_results.interval(np.full((5, 5), 2.0)) == (2.0, 2.0)
    narrow = np.subtract(*study_results.interval(seeds - seeds.mean(1, keepdims=True)))
    assert 0 < -narrow < high - low


def test_arms_are_reported_when_complete_and_finished_cells_are_not_run_again(tmp_path):
    keys = [(t, c, s) for t in TASKS for c in CONDITIONS for s in study_run.SEEDS]
    rows = [
        dict(zip(Cell._fields, (t, "mid", c, arm, s), strict=True))
        | {"accuracy": [0.1, 0.5 + gain]}
        for t, c, s in keys
        for arm, gain in (dict.fromkeys(study_run.MAIN, 0.0) | {"grpo": 0.1}).items()
    ]
    last = [row for row in rows if row["arm"] == "routing" and row["seed"] == 4]
    interim = study_results.Study(row for row in rows if row not in last[:1])
    assert list(interim.seeds) == [0, 1, 2, 3]
    assert interim.bases(*study_run.MAIN) == ["mid"]
    study = study_results.Study(rows)
    assert study.seeds == study_run.SEEDS
    assert study.bases("sft", "hpt") == []
    assert study.difference("grpo", "sft", ["mid"]) == "+10.0 [+10.0, +10.0]"
    path = tmp_path / "final.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cells = [(Cell(t, "mid", c, "sft", s), study_run.FIXED["mu-0.1"]) for t, c, s in keys]
    study_run.run_grid(tmp_path / "none", path, cells, "")
    assert len(study_run.finished(path)) == len(rows)


def test_a_base_that_differs_from_the_one_of_the_finished_runs_is_an_error(tmp_path):
    for base in ("sorting-weak", "sorting-mid", "sorting-mid"):  # the second finds its own digest
        (tmp_path / base).mkdir(exist_ok=True)
        (tmp_path / base / "model.safetensors").write_bytes(base.encode())
        study_run.check_base(tmp_path, base, tmp_path)
    (tmp_path / "sorting-mid" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ConfigError, match="sorting-mid"):
        study_run.check_base(tmp_path, "sorting-mid", tmp_path)
    study_run.check_base(tmp_path, "sorting-weak", tmp_path)


def test_page_has_the_numbers_of_the_raw_results():
    assert study_results.main(["--check"]) == 0
