"""The signal source `sketch`: unit sketches, two ranks, mu = 0, and unsupported configurations."""

import copy
import dataclasses
import math

import pytest
import torch

from gac.control.signals import sketch_moments
from gac.errors import ConfigError
from gac.methods import METHODS, Mix
from gac.methods.base import Loss
from gac.rollouts import engines
from gac.training.trainer import Trainer
from gac.types import Sketches
from gac_kernels import HeadSketch
from tests import ranks
from tests.methods.published import TEMPERATURE
from tests.parallel.test_distributed import fixed_responses
from tests.tiny import tiny_config

SIZE = 8
METHOD = {"name": "gac-gated-sketch", "signals": {"size": SIZE}}


def config(task, out, **changes):
    rollouts = {
        "num_prompts": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "temperature": TEMPERATURE,
    }
    return tiny_config(task, out, **{"method": METHOD, "rollouts": rollouts, **changes})


def measure(config, mu):
    """Measure the first step at `mu`. Returns the trainer, the step and the measurements."""
    engines.generate = fixed_responses  # runs in its own process, or the caller restores it
    trainer = Trainer(config)
    step = trainer._assemble(trainer._sample(), Mix(mu))
    return trainer, step, trainer.gradients(step)


def unit_sketches(config, mu):
    """Unit sketches of both terms, sorted because the order of the rows depends on the ranks."""
    return [sorted(term.tolist()) for term in measure(config, mu)[2].evidence.sketches]


@pytest.fixture
def fixed_rollouts(monkeypatch):
    monkeypatch.setattr(engines, "generate", fixed_responses)


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0])
def test_units_are_sketches_of_the_true_gradient(task, tmp_path, fixed_rollouts, mu):
    trainer, step, measured = measure(config(task, tmp_path, micro_batch_size=3), mu)
    model = copy.deepcopy(trainer.model).double()
    del model.forward  # the patched forward still calls the original model
    weight = model.get_output_embeddings().weight.detach().clone().requires_grad_()
    demos = [r for r in step.rows if r.is_demo]
    tokens = sum(r.loss_tokens for r in demos)
    truth: dict[tuple, torch.Tensor] = {}
    for i, row in enumerate(step.rows):
        ids = torch.tensor([row.ids])
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0, row.start - 1 : -1]
        logp = (hidden.detach() @ weight.T / (1.0 if row.is_demo else TEMPERATURE)).log_softmax(-1)
        logp = logp.gather(1, ids[0, row.start :, None])[:, 0]
        if row.is_demo:
            loss, key = -logp.sum() / tokens, (True, i)
        else:
            ratio = (logp - logp.detach()).exp()
            loss, key = -row.advantage * ratio.mean() / 16, (False, row.unit)
        truth[key] = truth.get(key, 0) + torch.autograd.grad(loss, weight)[0]
    sketch = HeadSketch(SIZE, step.sketch_seed)
    left, right = sketch.vocabulary(weight.shape[0]), sketch.hidden(weight.shape[1])
    for side, demo in zip(measured.evidence.sketches, (True, False), strict=True):
        gradients = [g for key, g in truth.items() if key[0] == demo]
        rows = [(left.double() @ g @ right.double().T).flatten() for g in gradients]
        expected = torch.stack(rows)
        assert len(expected) == 4
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(side, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.dist
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_any_split_of_the_batch_gives_the_same_units(task, tmp_path, fixed_rollouts, mu):
    single = unit_sketches(config(task, tmp_path / "one"), mu)
    splits = [unit_sketches(config(task, tmp_path / "split", micro_batch_size=3), mu)]
    for mode in ("ddp", "fsdp"):
        splits += ranks.run(
            unit_sketches,
            config(task, tmp_path / mode, micro_batch_size=3, parallel={"mode": mode}),
            mu,
            ranks=2,
        )
    for split in splits:
        for term, expected in zip(map(torch.tensor, split), map(torch.tensor, single), strict=True):
            torch.testing.assert_close(term, expected, rtol=1e-4, atol=2e-6)


def test_sketch_leaves_gradients_unchanged_and_reseeds_each_step(task, tmp_path, fixed_rollouts):
    trainer, step, measured = measure(config(task, tmp_path), 0.3)
    grads = [p.grad.clone() for p in trainer.model.parameters()]
    trainer.optimizer.zero_grad()
    plain = trainer.gradients(dataclasses.replace(step, needs=step.needs._replace(sketch=0)))
    assert plain.evidence.sketches is None
    assert plain.losses == measured.losses
    for p, grad in zip(trainer.model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)
    trainer.step = 2
    assert trainer._assemble(list(step.rows), step.mix).sketch_seed != step.sketch_seed


def test_unit_moments_are_unbiased_or_nan():
    generator = torch.Generator().manual_seed(0)
    s, r = torch.randn(2, 16, dtype=torch.float64, generator=generator)
    counts, noise, readings = (5, 3), (2.0, 3.0), []
    for _ in range(4000):
        sides = [
            (mean + scale * torch.randn(n, 16, dtype=torch.float64, generator=generator)) / n
            for mean, scale, n in zip((s, r), noise, counts, strict=True)
        ]
        reading = sketch_moments(Sketches(*sides))
        readings.append([*reading.signals, *reading.alignment])
    values = torch.tensor(readings, dtype=torch.float64)
    mean, error = values.mean(0), values.std(0) / len(values) ** 0.5
    inner_variance = values[:, 3].var()
    sft, rl = 16 * 4 / 5, 16 * 9 / 3
    totals = s @ s + sft, r @ r + rl
    expected = [sft, rl, (s - r).square().sum(), s @ r, inner_variance, s @ s, r @ r, *totals]
    for ours, spread, truth in zip(mean, error, expected, strict=True):
        assert abs(ours - truth) < 4 * spread + 0.05 * abs(truth) * (truth is inner_variance)
    for broken in (torch.full((4, 16), math.nan).double(), torch.empty(0, 16).double()):
        reading = sketch_moments(Sketches(broken, sides[1]))
        assert math.isnan(reading.signals.sft_variance)
        assert math.isnan(reading.alignment.inner)
        assert reading.signals.rl_variance > 0
        assert math.isfinite(reading.alignment.rl_square)


def test_a_loss_or_a_head_that_cannot_be_sketched_is_rejected(task, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="size=7"):
        config(task, tmp_path, method={**METHOD, "signals": {"size": 7}})
    settings = config(task, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("gac.models.head.Record.linear", lambda self: None)
        with pytest.raises(ConfigError, match="method.signals=sketch .*use method.signals"):
            Trainer(settings)
    unfused = Loss(settings.loss, token=lambda view: -view.logps)
    monkeypatch.setattr(METHODS["gac-gated-sketch"], "loss", lambda self, base: unfused)
    with pytest.raises(ConfigError, match="method.signals=sketch .*fused loss.*use method.signals"):
        Trainer(settings)
