"""Data that change during a run."""

import json
from pathlib import Path

import pytest

from gac.demo import task
from gac.models.causal_lm import load_tokenizer
from gac.training.feed import Feed
from tests.changing import Phases
from tests.tiny import tiny_config, write_tiny


def jsonl(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny task, with other demonstrations from step 3 on."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    demos = jsonl(folder / "demos.jsonl")
    later = [row | {"from_step": 3, "solution": row["solution"][::-1]} for row in demos]
    task.write_rows(folder / "changing.jsonl", [*demos, *later])
    return folder


def config_of(tiny, out, order="tests.changing:Phases", **changes):
    data = {
        "prompts": str(tiny / "prompts.jsonl"),
        "demos": str(tiny / ("changing.jsonl" if order else "demos.jsonl")),
        "order": order,
    }
    return tiny_config(tiny, out, **{"data": data, "steps": 6, "checkpoint_every": 1, **changes})


def test_rows_change_at_their_step_on_every_rank_and_after_a_resume(tiny, tmp_path):
    config, plain = config_of(tiny, tmp_path), config_of(tiny, tmp_path, None)
    tokenizer = load_tokenizer(config.model)
    feed, ranks = Feed(config, tokenizer, 0, 1), [Feed(config, tokenizer, i, 2) for i in (0, 1)]
    plain = Feed(plain, tokenizer, 0, 1)
    right, wrong = (
        {e.prompt + e.demo for e in part} for part in (feed.demos[:12], feed.demos[12:])
    )
    for step in range(6):
        rows, before = feed.demo_rows(step), plain.demo_rows(step)
        assert [
            r
            for pair in zip(*[sharded.demo_rows(step) for sharded in ranks], strict=True)
            for r in pair
        ] == rows
        if step < 3:
            assert rows == before
        assert {row.ids for row in rows} <= (right if step < 3 else wrong)
        assert [row.ids[: row.start] for row in rows] == [row.ids[: row.start] for row in before]
        if step in (1, 3):
            saved = json.loads(json.dumps(feed.state_dict()))
            feed = Feed(config, tokenizer, 0, 1)
            feed.load_state_dict(saved)
    with pytest.raises(ValueError, match="sets of sizes"):
        Phases([*feed.demos[:5], *feed.demos[12:]], 0)


def test_prompts_bring_other_demonstrations(tiny, tmp_path):
    data = {"prompts": str(tiny / "changing.jsonl"), "order": "tests.changing:Phases"}
    config = config_of(tiny, tmp_path, method="luffy", data=data)
    feed = Feed(config, load_tokenizer(config.model), 0, 1)
    for step in range(5):
        for example in (*feed.examples(step), *feed.more_examples(1)):
            assert example.extra.get("from_step", 0) == 3 * (step >= 3)
