"""A run that is killed and resumed, at any moment, writes the metrics of an uninterrupted run."""

import os
import random
import re
import shutil
import signal

import pytest

from gac.errors import UserError
from gac.order import Order
from gac.training.trainer import Trainer, train
from tests import kills, ranks
from tests.tiny import REUSED, digit_reward, metrics, tiny_config, with_config

RUN = {"steps": 8, "checkpoint_every": 2, "monitor_kl_every": 3}


def run_single(work, *args):
    """Run in a single-threaded process, because sums over several threads round differently."""
    return ranks.run(work, *args, ranks=1)[0]


@pytest.fixture(scope="module")
def uninterrupted(task, tmp_path_factory):
    """Metrics of an uninterrupted run, and its number of function calls and returns."""
    out = tmp_path_factory.mktemp("uninterrupted")
    calls = run_single(kills.count_calls, tiny_config(task, out, **RUN))
    return metrics(out), calls


def test_metrics_survive_random_kills(task, tmp_path, uninterrupted):
    rng, config, kills_left = random.Random(0), tiny_config(task, tmp_path, **RUN), 5
    while kills_left:
        # early kills hit the setup; a run that finished before its kill is deleted and restarted
        if run_single(kills.at_call, config, rng.randrange(uninterrupted[1])) is None:
            kills_left -= 1
        else:
            assert metrics(tmp_path) == uninterrupted[0]
            (tmp_path / "metrics.jsonl").unlink()
            shutil.rmtree(tmp_path / "checkpoints")
    run_single(train, config)
    assert metrics(tmp_path) == uninterrupted[0]


def test_kill_while_a_checkpoint_is_being_written(task, tmp_path, uninterrupted):
    config = tiny_config(task, tmp_path, **RUN)
    checkpoints = tmp_path / "checkpoints"
    partial, final = checkpoints / ".writing-00000002", checkpoints / "step-00000002"
    for file in ("__0_0.distcp", ".metadata.tmp", "progress.json"):
        assert run_single(kills.at_event, config, "open", f"{partial.name}/{file}") is None
        assert partial.exists()
        assert not (partial / file).exists()
        assert not final.exists()
    assert run_single(kills.at_event, config, "os.rename", final.name) is None
    assert (partial / "progress.json").exists()
    assert not final.exists()
    size = (partial / "__0_0.distcp").stat().st_size // 2
    assert run_single(kills.at_byte, config, size) is None
    assert (partial / "__0_0.distcp").stat().st_size == size
    assert not final.exists()
    run_single(train, config)  # ignores the partial checkpoint
    assert metrics(tmp_path) == uninterrupted[0]


def test_resume_is_exact_with_dropout(task, tmp_path, uninterrupted):
    folder = with_config(task, tmp_path / "task", attention_dropout=0.2)
    model = {"path": str(folder / "init"), "random_init": True, "keep_dropout": True}
    whole, config = (tiny_config(folder, tmp_path / x, **RUN, model=model) for x in "ab")
    expected = metrics(run_single(train, whole))
    # the option has an effect
    assert expected[1]["grad_norm"] != uninterrupted[0][1]["grad_norm"]
    assert run_single(kills.at_event, config, "os.rename", "step-00000006") is None
    assert len(metrics(tmp_path / "b")) == 6
    run_single(train, config)
    assert metrics(tmp_path / "b") == expected


calls = [0]


def fragile(completion, example):
    """A reward that fails in one of its calls: a step has 16, an evaluation 8."""
    calls[0] -= 1
    return {0: "not a number"}.get(calls[0]) or digit_reward(completion, example)


class Fragile(Order):
    """An order that fails in one of its calls: for demonstrations, then for prompts, if sampled."""

    def __init__(self, rows, seed):
        super().__init__(len(rows), seed)

    def take(self, k, step=0):
        calls[0] -= 1
        return super().take(k, step) if calls[0] else [self.n]


@pytest.mark.parametrize(
    ("key", "reuse", "steps", "every", "call", "saved"),
    [("reward", 1, 4, 9, 13, []), ("reward", 1, 4, 9, 45, ["step-00000002"])]
    # in the evaluation of step 2
    + [("reward", 1, steps, 1, 50, ["step-00000002"]) for steps in (4, 2)]
    # in the last evaluation, and in steps that reuse and sample rollouts
    + [("reward", 2, 3, 9, 45, ["step-00000003"])]
    + [("order", 2, 4, 9, 3, []), ("order", 2, 4, 9, 5, ["step-00000002"])],
)
def test_a_run_that_the_users_code_ends_is_saved(
    task, tmp_path, key, reuse, steps, every, call, saved
):
    """It has taken prompts and demonstrations for the step that fails, and takes them again."""
    changes = {
        "eval": {
            "data": {"prompts": str(task / "eval.jsonl")},
            "max_completion_length": 5,
            "every": every,
        },
        "steps": steps,
        "checkpoint_every": 9,
        "rollouts": REUSED | {"num_iterations": reuse},
        "reward": f"{__name__}:{'fragile' if key == 'reward' else 'digit_reward'}",
        "data": {
            "prompts": str(task / "prompts.jsonl"),
            "order": f"{__name__}:Fragile" if key == "order" else None,
        },
    }
    config, other = (tiny_config(task, tmp_path / name, **changes) for name in "ab")
    calls[0] = call
    with pytest.raises(UserError, match="not a number|data.order='.*Fragile': IndexError"):
        train(config)
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == saved
    assert metrics(train(config)) == metrics(train(other))
    ends = [
        (trainer.best, [(row["step"], row["accuracy"]) for row in trainer.record.evals.read()])
        for trainer in map(Trainer, (config, other))
    ]
    assert ends[0] == ends[1]


def stopped_twice(completion, example):
    """Both signals come in the third step."""
    calls[0] -= 1
    if not calls[0]:
        os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt
    return digit_reward(completion, example)


def test_a_second_signal_saves_nothing(task, tmp_path):
    changes = {"reward": f"{__name__}:stopped_twice", "eval": {}, "checkpoint_every": 9}
    calls[0] = 37
    with pytest.raises(KeyboardInterrupt, match="^$"):
        train(tiny_config(task, tmp_path, **changes))
    assert not any((tmp_path / "checkpoints").iterdir())


def test_job_resumes_exactly_after_one_rank_is_stopped_or_killed(task, tmp_path):
    stopped, interrupted = (
        tiny_config(task, tmp_path / name, **RUN, parallel={"timeout": 8}) for name in "ab"
    )
    event = "open", "-00000002/__1_0.distcp", "1", signal.SIGTERM
    assert (
        ranks.errors(kills.at_event, stopped, *event, ranks=2)
        == [f"saved step 3 in {tmp_path / 'a' / 'checkpoints'}"] * 2
    )
    ranks.run(train, stopped, ranks=2)
    event = "open", "-00000006/__1_0.distcp", "1"
    with ranks.job(kills.at_event, interrupted, *event, ranks=2) as job:
        survivor, killed = (rank.result() for rank in job)
    assert killed is None
    assert re.search("rank 1 is not responding.*resume from", str(survivor.error))
    ranks.run(train, interrupted, ranks=2)
    assert metrics(tmp_path / "b") == metrics(tmp_path / "a")
