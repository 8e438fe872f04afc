"""Demonstrations whose data name their source: losses by source, and one alarm per source."""

import json
from statistics import pvariance

import pytest
import torch

from gac.methods import METHODS, Observation
from gac.models.causal_lm import load_tokenizer
from gac.models.head import run_head
from gac.rows import collate
from gac.training.feed import Feed
from gac.training.trainer import Trainer
from tests.tiny import metrics, tiny_config, write_tiny


def mus(method, steps):
    """mu after each step; `steps` are lists of (source, loss), or losses without sources."""
    state, out = method.init(), []
    for number, batch in enumerate(steps):
        sources, losses = {}, tuple(pair[1] if isinstance(pair, tuple) else pair for pair in batch)
        for source, loss in (pair for pair in batch if isinstance(pair, tuple)):
            sources.setdefault(source, []).append(loss)
        last = Observation(number + 1, demo_losses=losses or None, losses_by_source=sources)
        state, mix = method.mix(json.loads(json.dumps(state)), last)
        out.append(mix.mu)
    return out, state


def test_each_source_has_its_own_alarm():
    """Two good sources alternate; without their names, every change looks like a rise."""
    method = METHODS["constant-alarm"]()
    steps = [[("a", 1.0)] * 4 if n // 12 % 2 else [("b", 2.0)] * 4 for n in range(120)]
    named, state = mus(method, steps)
    assert named == [0.4] * 120
    assert method.report(state) == {"demos_suspect": 0.0}
    unnamed, _ = mus(method, [[loss for _, loss in step] for step in steps])
    assert 0.02 in unnamed


def test_a_source_that_turns_bad_lowers_mu_by_its_share():
    method = METHODS["guarded"](mu=0.4, mu_suspect=0.1)
    steps = [[("good", 1.0), ("bad", 1.0 if n < 20 else 3.0), ("bad", 1.0)] for n in range(20)]
    steps += [[("good", 1.0), ("bad", 3.0), ("bad", 3.0), ("bad", 3.1)]] * 4
    steps += [[], [("good", 1.0)], [("bad", 3.0)]]
    values, state = mus(method, steps)
    mixed = pytest.approx(0.175)  # a quarter of 0.4, and three of 0.1
    assert values[:20] == [0.4] * 20
    assert values[22:24] == [mixed, mixed]
    # a skipped step changes nothing; then one source at a time
    assert values[24:] == [mixed, 0.4, 0.1]
    assert method.report(state) == {"demos_suspect": 1.0}
    _, before = mus(method, steps[:20])
    _, after = mus(method, steps[:24])
    message = method.log_message(before, after)
    assert message.startswith("source 'bad': the demonstration loss jumped to 3")
    assert "good" not in message
    assert method.log_message(after, after) is None


@pytest.mark.parametrize(
    "micro",
    [{}, {"micro_batch_size": 3}, {"micro_batch_size": None, "max_tokens_per_micro_batch": 64}],
)
def test_losses_belong_to_their_rows(tmp_path, micro):
    """Each row is a source of its own, so the loss of a source is that of one row."""
    task = write_tiny(tmp_path)
    data = {"source_field": "id", **{k: f"{task}/{k}.jsonl" for k in ("prompts", "demos")}}
    method = {"name": "gac", "signals": {"name": "proxy", "trim": 0.25}}
    config = tiny_config(task, tmp_path / "run", data=data, method=method, steps=1, **micro)
    rows = Feed(config, load_tokenizer(config.model), 0, 1).demo_rows(0)
    assert len({row.source for row in rows}) == 4
    trainer = Trainer(config)
    logps = [trainer.gradients.forward.row_logprobs([row])[0] for row in rows]
    batch = collate(rows, 0)
    with torch.no_grad():
        _, entropies = run_head(trainer.model, **batch.model_inputs).logprobs(batch.targets)
    trainer.run()
    (step,) = metrics(tmp_path / "run")
    for row, values in zip(rows, logps, strict=True):
        assert step[f"demo_nll/{row.source}"] == pytest.approx(-float(values.mean()), rel=1e-5)
    middle = sorted(-float(values.mean()) for values in logps)[1:3]
    assert step["sft_variance"] == pytest.approx(pvariance(middle), rel=1e-4)
    assert sum(key.startswith("demo_nll/") for key in step) == 4
    mean = float(entropies[batch.targets != -100].mean())
    assert step["demo_entropy"] == pytest.approx(mean, rel=1e-5)
    responses = trainer.rollouts.rows
    assert step["tokens"] == sum(len(row.ids) for row in [*rows, *responses])
    assert step["completions/mean_length"] == sum(row.loss_tokens for row in responses) / 16
    assert any(key.startswith("reward_mean/") for key in step)
