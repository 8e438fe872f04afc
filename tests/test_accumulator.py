"""The `accumulator` signal source: estimates are unbiased, norms match the gradient, results do not
depend on the number of ranks.
"""

from __future__ import annotations

import math

import pytest
import torch

from gac.control.accumulator import AccumulatorSignals, order, solve
from gac.control.evidence import Evidence, Norms
from gac.control.term_pair import Pair
from gac.errors import ConfigError
from gac.methods import Mix
from gac.rollouts import engines
from gac.training.accumulated import progress
from gac.training.optim import clip_gradient
from gac.training.trainer import Trainer

from . import ranks
from .test_distributed import fixed_responses
from .tiny import tiny_config

METHOD = {"name": "gac", "signals": {"name": "accumulator"}, "update_every": 1, "weight": "one"}


def config(task, out, **changes):
    rollouts = {"prompts": 6, "completions": 2, "max_new_tokens": 6}
    return tiny_config(
        task,
        out,
        **{
            "method": METHOD,
            "rollouts": rollouts,
            "demo_batch": 6,
            "micro_batch": 4,
            **changes,
        },
    )


def norms_found(config, mu):
    engines.generate = fixed_responses  # runs in its own process, or the caller restores it
    trainer = Trainer(config)
    found = trainer.gradients(trainer._assemble(trainer._sample(), Mix(mu)))
    norm = clip_gradient(trainer.model.parameters(), 0.0).item()
    return found.norms.squares.tolist(), found.norms.progress.tolist(), norm


@pytest.mark.parametrize("rows", [((2, 2, 2), (2, 2)), ((4, 4), (4, 4, 3)), ((1,) * 5, (3,) * 4)])
def test_estimates_are_unbiased(rows):
    generator = torch.Generator().manual_seed(1)
    s, r = torch.randn(2, 12, dtype=torch.float64, generator=generator)
    weights, noise = Pair(0.3, 0.7), Pair(2.0, 1.5)
    kinds = order(*map(len, rows))
    queues = [list(side) for side in rows]
    sizes = [queues[not demo].pop(0) for demo in kinds]
    seen, draws = progress(kinds, [float(n) for n in sizes]), 6000
    total = torch.zeros(draws, 12, dtype=torch.float64)
    squares = []
    for demo, size in zip(kinds, sizes, strict=True):
        mean, weight, scale = (s if demo else r), weights[not demo], noise[not demo]
        drawn = torch.randn(draws, size, 12, dtype=torch.float64, generator=generator)
        total = total + weight * (mean + scale * drawn).sum(1) / sum(rows[not demo])
        squares.append(total.square().sum(1))
    found = torch.tensor([solve(Norms(x, seen, weights)) for x in torch.stack(squares, 1)])
    mean, error = found.mean(0), found.std(0) / draws**0.5
    wanted = [s @ s, 12 * 4.0 / sum(rows[0]), r @ r, 12 * 2.25 / sum(rows[1]), s @ r]
    for ours, spread, truth in zip(mean, error, wanted, strict=True):
        assert abs(ours - truth) < 4 * spread
        assert (
            spread < 0.2 * abs(truth) + 0.5
        )  # the error bars are small enough for the test to fail


def test_readings_take_their_error_from_the_last_one_and_keep_to_what_is_told():
    source, kinds = AccumulatorSignals(), order(3, 3)
    seen = progress(kinds, [1.0] * 6)
    state, inner = source.init(), []
    for scale in (1.0, 4.0):  # two gradients of size 1 and 2 without noise, cosine 1/2
        f, h = seen.unbind(1)
        squares = scale * (0.25 * f**2 + 0.25 * 4 * h**2 + 2 * 0.25 * f * h)
        reading, state = source.read(Evidence(0, norms=Norms(squares, seen, Pair(0.5, 0.5))), state)
        inner.append(reading.alignment.inner)
        assert reading.alignment[2:] == pytest.approx([scale, 4 * scale] * 2)  # no noise
        assert reading.signals == pytest.approx([0, 0, 3 * scale], abs=1e-9)
        error = reading.alignment.inner_variance
        assert math.isnan(error) if scale == 1 else error == pytest.approx(9 / 2)
    assert inner == pytest.approx([1.0, 4.0])
    alone = Norms(seen[:, 1] ** 2, seen, Pair(0.0, 1.0))  # demonstrations have weight 0
    reading, after = source.read(Evidence(0, norms=alone), state)
    assert reading.alignment.rl_square == pytest.approx(1.0) and after == state
    assert math.isnan(reading.alignment.inner) and math.isnan(reading.signals.sft_variance)
    with pytest.raises(ValueError, match="evidence.norms=None"):
        source.read(Evidence(0), state)


@pytest.mark.dist
def test_norms_are_those_of_the_gradient_on_any_number_of_processes(task, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "generate", fixed_responses)
    squares, seen, norm = norms_found(config(task, tmp_path / "one"), 0.4)
    assert squares[-1] == pytest.approx(norm**2, rel=1e-5) and seen[-1] == [1.0, 1.0]
    points = [[0, 1 / 3], [2 / 3, 1 / 3], [1, 1 / 3], [1, 2 / 3], [1, 1]]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(points))
    for mode in ("ddp", "fsdp"):
        made = config(task, tmp_path / mode, micro_batch=2, parallel={"mode": mode})
        for found in ranks.run(norms_found, made, 0.4, ranks=2):
            assert found[0] == pytest.approx(squares, rel=1e-4)
            torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(seen))


def test_a_run_reads_it_and_others_are_told_what_is_missing(task, tmp_path):
    trainer = Trainer(config(task, tmp_path / "run"))
    trainer._train_step()
    assert all(map(math.isfinite, trainer.state["read"]))
    assert trainer.state["signals"]["inner"] is not None
    for change, text in (
        ({"micro_batch": None}, "1 micro-batches of demonstrations and 1 of rollouts"),
        ({"micro_batch": 6}, "1 micro-batches of demonstrations and 2"),
        ({"micro_batch": 3}, "a multiple of rollouts.completions=2"),
    ):
        with pytest.raises(ConfigError, match=text):
            Trainer(config(task, tmp_path / "wrong", **change))
    with pytest.raises(ConfigError, match="a closed gate stays closed"):
        config(task, tmp_path, method={**METHOD, "gate": {}, "mu_min": 0.0})
