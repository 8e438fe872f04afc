"""Log messages that say when the paper's weight or controller does not suit a run."""

import math

import pytest

from gac.methods import METHODS, Observation
from gac.step_end import weight_advice


def messages(kls, **fields) -> list[str | None]:
    """What a `gac` that refreshes at every step logs for these KLs."""
    method = METHODS["gac"](update_every=1, kl_decay=0.0, **fields).for_run(40)
    state, texts = method.init(), []
    for step, kl in enumerate(kls):
        before = state
        state, _ = method.mix(state, Observation(step, kl=kl))
        texts.append(method.log_message(before, state))
    return texts


def test_a_saturated_controller_is_reported_once_with_the_keys_to_change():
    texts = messages([0.065] * 30)
    (text,) = filter(None, texts)
    assert texts.index(text) == 4  # the first KL moves alpha to its bound: 0.7 exp(0.45) > 0.95
    for part in (
        "0.065",
        "method.kl_target=0.02",
        "method.alpha_max=0.95",
        "method.max_step=0.01",
        "optim.lr",
        "method.kl_sign=-1",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("kls", "fields"),
    [
        ([0.02] * 30, {}),  # on target
        ([0.0] * 30, {}),
        ([0.065] * 30, {"max_step": 1.0}),  # no cap, so mu rises at once
        ([0.065] * 30, {"kl_sign": -1}),
        ([0.065, 0.001] * 15, {}),
    ],
)
def test_other_controllers_are_not(kls, fields):
    assert not any(messages(kls, **fields))


@pytest.mark.parametrize(
    ("weight", "losses", "advised"),
    [
        (0.05, [2.6, 2.8], True),  # an untrained model: p is 1 / 14 everywhere
        (0.05, [0.1, 0.2], False),  # a model that knows its demonstrations
        (0.098, [1.8], False),  # SmolLM2-135M-Instruct on worked sums
        (0.08, [2.6, 2.8], False),
        (None, [2.6, 2.8], False),  # weight one
        (0.05, None, False),
    ],
)
def test_a_low_weight_is_advised_against_where_the_model_knows_nothing(weight, losses, advised):
    text = weight_advice({"demo_weight": weight}, losses)
    assert bool(text) == advised
    assert text is None or "method.weight=one" in text


def test_phi_of_an_untrained_model_counts_as_low():
    p = 1 / 14
    text = weight_advice({"demo_weight": p * (1 - p)}, [-math.log(p)])
    assert text is not None
