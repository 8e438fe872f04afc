"""Methods over several steps, with numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from gac.methods import METHODS, Observation


def test_gradnorm_favors_the_term_that_lags() -> None:
    """Both gradients have norm 1; the demonstration loss falls to a tenth, rewards stay."""
    method = METHODS["gradnorm"](lr=0.1)
    state, gram = method.init(), torch.eye(2, dtype=torch.float64)
    state, mix = method.mix(state, Observation(1, demo_loss=2.0, reward_mean=0.0))
    state, weights = method.solve(state, gram, mix)
    assert weights == (1.0, 1.0)
    state, mix = method.mix(state, Observation(2, demo_loss=0.2, reward_mean=0.0))
    state, weights = method.solve(state, gram, mix)
    # targets are (2 * 0.1 / 1.1)^1.5 < 1 and (2 / 1.1)^1.5 > 1 of the mean: one step of 0.1 each
    assert weights == pytest.approx((0.9, 1.1))
    equal = METHODS["gradnorm"](lr=0.1, asymmetry=0.0)
    assert equal.solve(state, torch.diag(torch.tensor([4.0, 1.0]).double()), mix)[1][0] < 0.9


@pytest.mark.parametrize("name", ["uncertainty", "dwa", "gradnorm"])
@pytest.mark.parametrize("measured", [{"demo_loss": 2.0}, {"reward_mean": 0.5}])
def test_a_step_without_one_of_the_losses_does_not_count(name: str, measured) -> None:
    method = METHODS[name]()
    before, _ = method.mix(method.init(), Observation(0))
    after, mix = method.mix(before, Observation(1, **measured))
    assert after == before and mix.mu == 0.5


def test_superrl_replaces_groups_without_a_reward() -> None:
    rewards = torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.0, torch.nan]])
    credit = METHODS["superrl"]().credit(rewards, None, "centered")
    assert credit.rollout_weight.tolist() == [0.0, 1.0, 0.0]
    assert credit.demo_weight.tolist() == [1.0, 0.0, 1.0]
    assert credit.rollouts[1].tolist() == [-0.25, 0.25]
    assert METHODS["superrl"]().mix({}, Observation(0))[1].pair == (1.0, 1.0)
