"""Training on code: examples/mbpp.yaml on the real dataset, with a model small enough for a CPU."""

import math
import sys
from pathlib import Path

import pytest

from gac.config import load
from gac.data import load_demos, read_rows
from gac.models.causal_lm import load_tokenizer
from gac.rewards import build_reward
from gac.rewards.check import check
from gac.rewards.code import CodeReward
from gac.train_config import TrainConfig
from gac.training.trainer import train
from tests.tiny import metrics, write_bpe_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
EXAMPLE = Path(__file__).parents[2] / "examples" / "mbpp.yaml"
COUNTS = {f"rewards_{name}" for name in ("dropped", "timeouts", "stalled", "crashes", "no_program")}


@pytest.fixture(scope="module")
def model(data_dir, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_bpe_model(
        folder,
        [
            row.fields["prompt"] + row.fields["answer"]
            for row in read_rows(str(data_dir / "mbpp.jsonl.gz"))
        ],
    )
    return folder


@pytest.fixture
def overrides(data_dir, model, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setenv("GAC_DATA", str(data_dir))
    return [
        f"out={tmp_path / 'run'}",
        f"model.path={model}",
        "model.random_init=true",
        "model.dtype=float32",
        "steps=2",
        "rollouts.num_prompts=2",
        "rollouts.num_generations=3",
        "rollouts.max_completion_length=8",
        "demo_batch_size=4",
        "data.chat=false",  # the model has no chat template
        "eval.data.chat=false",
        "data.limit=40",
        "eval.data.limit=2",
        "eval.max_completion_length=4",
        "data.max_prompt_tokens=null",
        "export=false",
    ]


def test_two_steps_on_real_rows(overrides):
    rows = metrics(train(load(TrainConfig, EXAMPLE, overrides)))
    assert len(rows) == 2
    assert all(math.isfinite(row["grad_norm"]) for row in rows)
    for row in rows:
        # a random model writes no program that passes; the rows themselves are sound
        assert row["reward_mean"] == 0
        assert row["rewards_dropped"] == 0
        assert row.keys() >= COUNTS
        assert row["demo_loss"] > 0
        assert row["sft_variance"] > 0


class FixedAnswers(CodeReward):
    """A code reward that ignores the completions and grades three fixed answers per prompt."""

    def outcomes(self, completions, examples):
        texts = ["```python\n{}\n```", "```\nwhile True: pass\n```", "```\n```"]
        return super().outcomes(
            [texts[i % 3].format(e.answer) for i, e in enumerate(examples)], examples
        )


def test_reward_counters_are_in_the_metrics(overrides):
    reward = f"{{name: '{__name__}:FixedAnswers', timeout: 1, setup_field: test_setup_code}}"
    overrides += ["steps=1", f"reward={reward}", "eval={}"]
    (row,) = metrics(train(load(TrainConfig, EXAMPLE, overrides)))
    assert row["reward_mean"] == pytest.approx(1 / 3)
    assert row["rl_variance"] > 0
    # which of the first two depends on the load of the machine
    assert row["rewards_timeouts"] + row["rewards_stalled"] == 2
    assert (row["rewards_no_program"], row["rewards_crashes"]) == (2, 0)


def test_every_demonstration_earns_the_reward(overrides):
    config = load(TrainConfig, EXAMPLE, overrides)
    tokenizer = load_tokenizer(config.model)
    demos = load_demos(config.data, tokenizer)
    assert len(demos) == 40
    assert all(e.extra["split"] == "train" for e in demos)
    assert (
        build_reward(config.reward)(
            [tokenizer.decode(e.demo, skip_special_tokens=True) for e in demos[:20]], demos[:20]
        )
        == [1.0] * 20
    )


def test_check_passes_on_the_example(overrides):
    report = check(EXAMPLE, ["data.limit=5"])
    assert (report.rows, report.failing) == (5, ())
