"""Which prompts and demonstrations each rank gets in each step, and how long a row may be."""

import json
from pathlib import Path
from typing import Any

import pytest

from gac import collectives
from gac.errors import DataError
from gac.models.causal_lm import load_tokenizer
from gac.training.feed import Feed
from tests.tiny import tiny_config

GRPO, LUFFY, SFT = "grpo", "luffy", "sft"


def make_feed(task: Path, rank: int = 0, ranks: int = 1, **changes: Any) -> Feed:
    config = tiny_config(task, task / "run", **changes)
    return Feed(config, load_tokenizer(config.model), rank, ranks)


def prompts(task: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("tokens", [None, 60])
def test_ranks_share_the_batch_of_one_process(task, tokens) -> None:
    """In turn, and also if micro-batches are sized in tokens, unless parts are compared."""
    settings = {"demo_batch_size": 6}
    if tokens:
        settings["max_tokens_per_micro_batch"] = tokens
    single = make_feed(task, **settings)
    ranks = [make_feed(task, rank, 2, **settings) for rank in (0, 1)]
    for step in range(5):
        positions = single.state_dict()
        expected = single.examples(step), single.demo_rows(step)
        assert single.before == (step, positions)
        for rank, feed in enumerate(ranks):
            assert [e.id for e in feed.examples(step)] == [e.id for e in expected[0][rank::2]]
        rows = [feed.demo_rows(step) for feed in ranks]
        if tokens:
            assert sorted(rows[0] + rows[1]) == sorted(expected[1])
        else:
            assert rows == [expected[1][0::2], expected[1][1::2]]
    assert single.demo_rows(step)[0].advantage == 1.0


def test_all_ranks_draw_new_prompts_in_rank_order(task, monkeypatch) -> None:
    order = make_feed(task).prompt_order.take(16)
    feed = make_feed(
        task, 1, 3, rollouts={"num_prompts": 3, "num_generations": 2}, demo_batch_size=3
    )
    monkeypatch.setattr(collectives, "gather", lambda number: [2, number, 4])
    for place in (2, 9):
        assert [e.index for e in feed.more_examples(1)] == [order[place]]
    assert [e.index for e in feed.examples(0)] == [order[15]]


@pytest.mark.parametrize(
    ("ranks", "method", "tokens", "balances"),
    [
        (1, "gac", 60, False),
        (2, "gac", 60, True),
        (2, "gac", None, False),
        (2, "pcgrad", 60, True),  # one part of each term
        (2, "sdmgrad", 60, False),  # two parts
    ],
)
def test_rows_are_moved_between_ranks_unless_parts_are_compared(
    task, ranks, method, tokens, balances
) -> None:
    changes = {"micro_batch_size": None, "max_tokens_per_micro_batch": tokens}
    assert make_feed(task, 0, ranks, method=method, **changes).balances is balances


@pytest.mark.parametrize(("key", "value"), [("demo_batch_size", 3), ("rollouts", 5)])
@pytest.mark.parametrize(
    ("method", "ranks", "factors"),
    [
        ("gac", 2, "2"),
        ("pcgrad", 2, "2"),  # one part of each term
        ({"name": "gac", "signals": "gradients"}, 1, "1, times the number of gradient parts, 4"),
        ("sdmgrad", 3, "3, times the number of gradient parts, 2"),
    ],
)
def test_batches_are_divisible_by_the_ranks_and_parts(
    task, method, ranks, factors, key, value
) -> None:
    """Otherwise some parts of a rank's rows would be empty, or divide the rollouts of a prompt."""
    name = "rollouts.num_prompts" if key == "rollouts" else key
    sizes = {"rollouts": {"num_prompts": 12, "num_generations": 2}, "demo_batch_size": 12}
    make_feed(task, 0, ranks, method=method, **sizes)
    sizes |= {key: {"num_prompts": 5, "num_generations": 2} if key == "rollouts" else value}
    with pytest.raises(ValueError, match=f"^{name}={value}: use a multiple .*, {factors}$"):
        make_feed(task, 0, ranks, method=method, **sizes)
    make_feed(task, method="gac", **sizes)


def test_a_limited_number_of_demonstrations_and_epochs(task) -> None:
    """Two epochs over 5 demonstrations in batches of 3 are 3 whole steps."""
    method = {"name": "sft-best", "examples": 5, "epochs": 2}
    feed = make_feed(task, method=method, steps=9, demo_batch_size=3)
    assert (feed.steps, len(feed.demos)) == (3, 5)
    assert make_feed(task, method=method, steps=2, demo_batch_size=3).steps == 2
    assert make_feed(task, method=method, demo_batch_size=11).steps == 1
    feed = make_feed(task, steps=9, demo_batch_size=3)
    assert (feed.steps, len(feed.demos)) == (9, 12)


def test_a_resumed_feed_continues(task) -> None:
    first, second = make_feed(task), make_feed(task)
    first.examples(0)
    first.demo_rows(0)
    state = json.loads(json.dumps(first.state_dict()))
    assert {name: order["seed"] for name, order in state.items()} == {
        "prompt_order": 0,
        "demo_order": 1,
    }
    second.load_state_dict(state | {"collected": [4]})
    assert [e.id for e in second.examples(1)] == [e.id for e in first.examples(1)]
    assert second.demo_rows(1) == first.demo_rows(1)
    assert second.collected == [4]
    again = make_feed(task)
    del state["demo_order"]  # a checkpoint from before the method used demonstrations
    second.load_state_dict(state)
    again.load_state_dict(state)
    assert again.demo_rows(0) == make_feed(task).demo_rows(0)
    assert second.collected == []


def test_the_collection_is_shared_by_the_ranks(task, monkeypatch) -> None:
    """In the order of a single process; the newest are used once there are enough."""
    feed = make_feed(task, 1, 2, method={"name": "relift", "buffer": 5})
    own = [feed.prompts[0], None, feed.prompts[3]]
    monkeypatch.setattr(collectives, "gather", lambda indices: [[5, 6], indices])
    assert feed.demo_rows(0, own) == []  # 4 are not enough
    feed.collected = [9, 8]
    rows = feed.demo_rows(1, [feed.prompts[0], None])
    assert feed.collected == []
    assert [r.ids for r in rows] == [
        e.prompt + e.demo for e in map(feed.prompts.__getitem__, (8, 0))
    ]
    feed.collected = [7, 8]
    feed.demo_rows(2, own)
    assert feed.state_dict()["collected"] == [7]
    no_collection = make_feed(task, 0, 2)
    monkeypatch.setattr(collectives, "gather", lambda indices: pytest.fail("not needed"))
    assert len(no_collection.demo_rows(0, own)) == 2


# ---- demonstrations of the prompts


def test_some_prompts_must_have_a_demonstration(task, tmp_path) -> None:
    rows = prompts(task)
    without = [{k: v for k, v in row.items() if k != "solution"} for row in rows]
    data = {"prompts": write(tmp_path / "some.jsonl", rows[:1] + without[1:])}
    make_feed(task, method=LUFFY, data=data)
    first, longer = (
        make_feed(
            task, method={"name": "sft-then-rl", "sft_steps": 5}, data=data, **sizes
        ).sources()
        for sizes in ({"steps": 4}, {"steps": 8})
    )
    assert [*longer] == ["prompts", *first]
    assert longer["demonstrations"].digest == first["demonstrations"].digest
    data = {"prompts": write(tmp_path / "none.jsonl", without), "demo_field": "expert"}
    with pytest.raises(ValueError, match=r"'expert': method 'luffy' needs .*none\.jsonl has this"):
        make_feed(task, method=LUFFY, data=data)


@pytest.mark.parametrize(
    ("data", "names"), [({}, False), ({"source_field": "op"}, True), ({"sources": True}, True)]
)
def test_sources_have_names_if_the_data_give_them(task, data, names) -> None:
    path = str(task / "prompts.jsonl")
    data = {"sources": [{"path": path}]} if "sources" in data else {"prompts": path, **data}
    assert make_feed(task, data=data).names_sources is names


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("grpo", {}),
        ("sft", {"separate_demos": True}),
        ("gac", {"separate_demos": True}),
        ("luffy", {"trains_on_prompt_demos": True}),
        ("dpo", {"unit": 2}),
        ("dypo", {"trains_on_prompt_demos": True, "unit": 4}),
    ],
)
def test_what_a_method_asks_of_the_data(task, method, flags) -> None:
    feed = make_feed(task, method=method)
    default = {"separate_demos": False, "trains_on_prompt_demos": False, "unit": 1}
    assert {name: getattr(feed, name) for name in default} == default | flags
    if "prompt_order" in feed.orders:
        assert len(feed.examples(0)) == 4


def test_prefixes_of_demonstrations_with_several_turns_are_refused(task, tmp_path) -> None:
    data = {
        "prompts": write(
            tmp_path / "turns.jsonl", [row | {"solution": ["1", "2", "3"]} for row in prompts(task)]
        )
    }
    assert make_feed(task, method=LUFFY, data=data).prompts.turns
    with pytest.raises(ValueError, match="^method='uft' continues prefixes .* several turns$"):
        make_feed(task, method="uft", data=data)


def test_rows_that_must_not_be_trained_on(task, tmp_path) -> None:
    rows = prompts(task)
    marked = write(tmp_path / "marked.jsonl", [*rows[:-1], rows[-1] | {"canary": "x"}])
    with pytest.raises(DataError, match="canary"):
        make_feed(task, method=GRPO, data={"prompts": marked})
    with pytest.raises(DataError, match="canary"):
        make_feed(task, data={"prompts": str(task / "prompts.jsonl"), "demos": marked})


# ---- the longest row


def row(number: int, prompt: int, demo: int) -> dict[str, Any]:
    """A row whose prompt and demonstration, with its EOS token, have these numbers of tokens."""
    return {
        "id": f"{number}",
        "prompt": "1" * prompt,
        "answer": "1",
        **({"solution": "2" * (demo - 1)} if demo else {}),
    }


@pytest.mark.parametrize(
    ("method", "start", "longest"),
    [
        (GRPO, 10, 17),
        ({"name": "trapo", "sizes": [1, 1, 1, 1], "below": [-1, 2, 2, 2]}, 49, 56),
        ("sdar", 10, 60),  # 2 * 4 + 45 + 7
        (LUFFY, 10, 49),
        ("gac", 10, 39),
        (SFT, 0, 39),
    ],
)
def test_the_longest_row_by_hand(task, tmp_path, method, start: int, longest: int) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [row(0, 4, 45), row(1, 10, 0)])
    data = (
        {
            "prompts": prompts,
            "demos": write(tmp_path / "demos.jsonl", [row(0, 35, 4), row(1, 3, 30)]),
        }
        if method in ("gac", SFT)
        else {"prompts": prompts}
    )
    feed = make_feed(
        task,
        method=method,
        data=data,
        demo_batch_size=2,
        rollouts={"num_prompts": 2, "num_generations": 4, "max_completion_length": 7},
    )
    assert (feed.longest_start(), feed.longest_row(7)) == (start, longest)
