"""The prior of the controller in runs of any length."""

import logging
from pathlib import Path

import pytest

from gac.methods import METHODS
from gac.training.check import check_training
from gac.training.trainer import train
from tests.tiny import metrics, tiny_config


@pytest.mark.parametrize("name", ["gac", "gac-paper"])
def test_the_prior_falls_within_a_short_run(name: str) -> None:
    method = METHODS[name]().for_run(20)
    assert method.prior(0) == 0.85
    assert method.prior(19) < 0.2


def test_a_controller_that_ignores_the_prior_runs() -> None:
    method = METHODS["gac"](prior_blend=1.0)
    assert method.for_run(20) == method
    assert method.run_warning(20) is None


def test_a_run_uses_the_scaled_prior(task: Path, tmp_path: Path) -> None:
    config = tiny_config(task, tmp_path / "run", method="gac", steps=4)
    train(config)
    priors = [row["prior"] for row in metrics(tmp_path / "run")]
    assert priors == [METHODS["gac"]().for_run(4).prior(t) for t in range(4)]
    assert priors[-1] < 0.5


@pytest.mark.parametrize(
    ("prior", "warns"),
    [({}, False), ({"hold": 1, "decay": 2}, False), ({"hold": 200, "decay": 600}, True)],
)
def test_a_prior_that_does_not_fit_the_run_is_a_warning(
    task: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    prior: dict[str, int],
    warns: bool,
) -> None:
    config = tiny_config(task, tmp_path / "run", method={"name": "gac", "prior": prior}, steps=8)
    with caplog.at_level(logging.WARNING):
        check_training(config)
    text = "method.prior: hold=200, decay=600 is longer than steps=8"
    assert (text in caplog.text) == warns
