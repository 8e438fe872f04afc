"""Methods over several steps, with numbers computed by hand."""

from __future__ import annotations

import math
import re

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


GOLDEN = 18.0, -22.0, 38.0
PARALLEL, ORTHOGONAL = (1.0, 1.0, 1.0), (4.0, 0.0, 1.0)
ROOT = math.sqrt(2.5)  # of the mean eigenvalue of ORTHOGONAL
OPTIONS = [  # name, fields, <s, s>, <s, r> and <r, r>, weights in the fourth step
    ("mgda", {"unit_rl": True}, (4.0, 0.0, 9.0), (0.2, 0.8 / 3)),
    ("pcgrad", {"threshold": -0.9}, GOLDEN, (1.0, 1.0)),
    ("cagrad", {"radius": 0.0}, GOLDEN, (0.5, 0.5)),
    ("cagrad", {"rescale": 2}, PARALLEL, (0.75 / 1.5, 0.75 / 1.5)),
    ("cagrad", {"radius": 2.0, "rescale": 1}, PARALLEL, (1.5 / 5, 1.5 / 5)),
    ("nash-mtl", {"max_norm": None, "scale": 3.0}, ORTHOGONAL, (1.5, 3.0)),
    ("nash-mtl", {"max_norm": math.sqrt(0.5)}, ORTHOGONAL, (0.25, 0.5)),
    ("aligned-mtl", {"mode": "rmse"}, ORTHOGONAL, (0.25 * ROOT, 0.5 * ROOT)),
    ("aligned-mtl", {"preference": (1.0, 0.0)}, ORTHOGONAL, (0.5, 0.0)),
    ("sdmgrad", {"regularization": 0.0}, GOLDEN, (0.6, 0.4)),
    # x + 0.5 = 1 - x
    ("sdmgrad", {"regularization": 0.5, "preference": (1, 0)}, (1, 0, 1), (0.5, 0.5)),
    # (0.8 - 0.2) / 2 less for s, with a step size of 0.5 / 4
    ("moco", {"lr": 0.5, "decay": 1.0}, (8.0, -2.0, 2.0), (0.48125, 0.51875)),
    # norms 3 and 1, mean 2, and no losses: 0.1 * 3 / 2 less for s, 0.1 / 2 more for r; sum 2
    ("gradnorm", {"lr": 0.1}, (9.0, 0.0, 1.0), (2 * 0.85 / 1.9, 2 * 1.05 / 1.9)),
    ("gradnorm-ctrl", {}, (9.0, 0.0, 1.0), (0.75, 0.25)),
    ("gradnorm-ctrl", {"invert": True}, (9.0, 0.0, 1.0), (0.25, 0.75)),
    ("gta", {"sft_coef": 0.5, "rl_coef": 2.0}, ORTHOGONAL, (0.5, 2.0)),
    ("gta", {"sft_coef": 0.5, "rl_coef": 2.0}, GOLDEN, (0.0, 2.0)),
]


@pytest.mark.parametrize(("name", "fields", "products", "expected"), OPTIONS)
def test_options_of_gradient_solvers(name: str, fields, products, expected) -> None:
    method = METHODS[name](**fields)
    state, mix = method.mix(method.init(), Observation(3))
    a, b, c = products
    gram = torch.tensor([[a, b], [b, c]], dtype=torch.float64).kron(torch.ones(2, 2))
    assert method.solve(state, gram, mix)[1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cagrad", {"rescale": 3}),
        ("aligned-mtl", {"mode": "mean"}),
        ("aligned-mtl", {"preference": (1.0, -1.0)}),
        ("sdmgrad", {"preference": (1.0, -1.0)}),
        ("sdmgrad", {"unit_rl": True}),
        ("gradnorm-ctrl", {"unit_rl": True}),
        ("gac", {"gradient_parts": 1}),
        ("kl-ctrl", {"sign": 0}),
        ("amft", {"mu_min": -0.1}),
        ("amft", {"mu_init": 0.99}),
        ("amft", {"mu_max": 1.1}),
    ],
)
def test_invalid_options_are_named(name: str, fields) -> None:
    ((field, value),) = fields.items()
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}") + ".*use "):
        METHODS[name](**fields)


@pytest.mark.parametrize("name", ["luffy", "prefix-rft"])
def test_a_group_with_a_demonstration_needs_a_rollout_as_well(name: str) -> None:
    assert METHODS[name]().sampling(2)
    with pytest.raises(ValueError, match=r"rollouts\.completions=1: use 2 or more"):
        METHODS[name]().sampling(1)


@pytest.mark.parametrize("name", ["uncertainty", "dwa"])
@pytest.mark.parametrize(
    "measured",
    [{"demo_loss": 2.0}, {"reward_mean": 0.5}, {"demo_loss": math.nan, "reward_mean": 0.5}],
)
def test_a_step_without_one_of_the_losses_does_not_count(name: str, measured) -> None:
    method = METHODS[name]()
    before, _ = method.mix(method.init(), Observation(0))
    after, mix = method.mix(before, Observation(1, **measured))
    assert after == before and mix.mu == 0.5


@pytest.mark.parametrize("name", ["hpt", "superrl", "relift", "dypo", "srft"])
def test_a_rollout_is_correct_above_the_limit(name: str) -> None:
    rewards = torch.tensor([[0.25, 0.0], [0.5, 0.0]], dtype=torch.float64)
    credit = METHODS[name](correct=0.25).credit(rewards, None, "centered")
    if name == "srft":
        assert credit.rollouts.tolist() == [[-1.0, -1.0], [1.0, -1.0]]
    else:
        assert credit.demo_weight.tolist() == [1.0, 0.0]
        assert credit.rollout_weight.tolist() == [float(name == "relift"), 1.0]


def test_superrl_replaces_groups_without_a_reward() -> None:
    rewards = torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.0, torch.nan]])
    credit = METHODS["superrl"]().credit(rewards, None, "centered")
    assert credit.rollout_weight.tolist() == [0.0, 1.0, 0.0]
    assert credit.demo_weight.tolist() == [1.0, 0.0, 1.0]
    assert credit.rollouts[1].tolist() == [-0.25, 0.25]
    assert METHODS["superrl"]().mix({}, Observation(0))[1].pair == (1.0, 1.0)
