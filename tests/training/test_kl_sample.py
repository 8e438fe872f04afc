"""The KL to the reference from a sample of the rollouts: its size, its mean, its standard error."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gac.config import load
from gac.rows import Row, collate
from gac.train_config import TrainConfig, kl_rollouts
from gac.training.gradients import SampledKL
from gac.training.trainer import Trainer, train
from tests.tiny import metrics, tiny_config


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"method": "gac"}, 4),
        ({"method": "gac-paper", "rollouts": {"num_prompts": 3, "num_generations": 3}}, 2),
        ({"method": "gac", "kl_sample_size": 7}, 7),
        ({"method": "gac", "loss": {"kl_coef": 0.1}}, None),
        ({"method": "kl-ctrl"}, None),  # its mu is a function of the KL, not of a comparison
        ({"method": "constant", "monitor_kl_every": 2}, None),
    ],
)
def test_only_a_method_that_compares_the_kl_with_a_target_samples_by_default(changes, size):
    rollouts = {"rollouts": {"num_prompts": 4, "num_generations": 8}}
    assert kl_rollouts(load(TrainConfig, rollouts | changes)) == size


def test_mean_and_standard_error_of_a_ratio():
    """Against numpy: the error by linearization, which the jackknife confirms."""
    rng = np.random.default_rng(0)
    rows = [Row(tuple(range(1, n + 2)), 1, False, sequence=i) for i, n in enumerate([3, 9, 5, 7])]
    policy = [torch.tensor(-rng.random(row.loss_tokens)) for row in rows]
    reference = [x + torch.tensor(rng.normal(0, 0.5, len(x))) for x in policy]
    kl = SampledKL.__new__(SampledKL)
    kl.reference = dict(enumerate(reference))
    kl.sums = torch.zeros(6, dtype=torch.float64)
    for pair in ((0, 1), (2, 3)):
        own = [rows[i] for i in pair]
        batch = collate(own, 0)
        logps = torch.zeros(batch.targets.shape, dtype=torch.float64)
        for line, i in zip(logps, pair, strict=True):
            line[: rows[i].loss_tokens] = policy[i]
        kl.add(batch, own, SimpleNamespace(logps=logps))
    gaps = [(r - p).numpy() for r, p in zip(reference, policy, strict=True)]
    sums, counts = np.array([[(np.exp(g) - g - 1).sum(), len(g)] for g in gaps]).T
    mean = sums.sum() / counts.sum()
    residuals = sums - mean * counts
    error = np.sqrt(4 * residuals.var(ddof=1)) / counts.sum()
    left_out = [(sums.sum() - s) / (counts.sum() - n) for s, n in zip(sums, counts, strict=True)]
    jackknife = np.sqrt(3 * np.var(left_out))
    assert kl.estimate() == pytest.approx((mean, error))
    assert error == pytest.approx(jackknife, rel=0.5)


def test_a_run_of_gac_measures_the_kl_of_its_sample(task, tmp_path):
    trainer = Trainer(tiny_config(task, tmp_path, method="gac", steps=12, eval={}))
    assert trainer.gradients.kl_sample_size == 2  # of 16 rollouts
    trainer.run()
    rows = metrics(tmp_path)
    measured = [row["step"] for row in rows if row["kl"] is not None]
    assert measured == [1, 10]
    assert rows[0]["kl"] == rows[0]["kl_standard_error"] == 0
    assert rows[9]["kl_standard_error"] > 0
    assert all(row["kl_standard_error"] is None for row in rows if row["kl"] is None)


def test_demo_weight_is_the_mean_of_phi(task, tmp_path):
    """Against a forward of the initial model; null with weight one."""
    trainer = Trainer(tiny_config(task, tmp_path / "phi", method="gac", steps=1, eval={}))
    rows = trainer._sample()
    demos = [row for row in rows if row.is_demo]
    numbered = [row._replace(sequence=i) for i, row in enumerate(demos)]
    logps = trainer.gradients.forward.row_logprobs(numbered)
    p = torch.cat(logps).double().exp()
    measured = trainer.gradients(trainer._assemble(rows, trainer.mix))
    assert measured.demo_weight == pytest.approx((p * (1 - p)).mean().item(), rel=1e-5)
    trainer.heartbeat.stop()
    config = tiny_config(task, tmp_path / "one", method="constant", steps=1, eval={})
    assert metrics(train(config))[0]["demo_weight"] is None
