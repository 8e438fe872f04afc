"""What each method asks of the trainer: its loss, its sampling and its needs."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import FrozenInstanceError, replace

import pytest

from gac.config import choose
from gac.control.schedules import RandomPrior
from gac.methods import METHODS
from gac.methods.base import Loss, StepNeeds
from gac.methods.constant import Constant
from gac.methods.listing import methods_table
from gac.methods.preset import preset
from gac.rollouts.plan import Sampling, Stage
from gac_kernels import DemoWeight, LossSpec

BASE = LossSpec(  # values that no method sets
    clip_low=0.11,
    clip_high=0.12,
    kl_coef=0.13,
    entropy_coef=0.14,
    demo_weight=DemoWeight.PHI,
    demo_shape=0.15,
    rollout_reduction="sum",
    demo_reduction="sum",
    max_tokens=9,
)
ENTROPY = {"entropy_coef": 0.4}
FIELDS = {
    "dapo": {"clip_low": 0.3, "clip_high": 0.4},
    "luffy": {"shape": 0.3, **ENTROPY},
    **dict.fromkeys(["hpt", "relift"], ENTROPY),
    "trapo": {"trust": 0.3},
    "gta": {"guess_tokens": 6},
    "amft": {"warmup": 3, "update_every": 12},
    "sft-then-rl": {"sft_steps": 10},
}
PER_SEQUENCE = {"rollout_reduction": "sequence"}
PER_TOKEN = {"demo_reduction": "token"}
PER_LIMIT = {"rollout_reduction": "constant"}  # sums are divided by max_tokens
POOLED = {**PER_LIMIT, "demo_reduction": "constant"}
UNCLIPPED = {"clip_low": None, "clip_high": None}
SHAPED = {"demo_weight": DemoWeight.SHAPED}
SPECS = {  # changes of the configured loss, in addition to `weight`
    **dict.fromkeys(["dpo", "ipo", "gspo"], PER_SEQUENCE),
    "dr-grpo": PER_LIMIT,
    "dapo": {**FIELDS["dapo"], "kl_coef": 0.0, "rollout_reduction": "token"},
    **dict.fromkeys(["multitask", "uft"], PER_TOKEN),
    "luffy": {**UNCLIPPED, **POOLED, **ENTROPY, "demo_shape": 0.3},
    **dict.fromkeys(["hpt", "relift"], UNCLIPPED | PER_LIMIT | PER_TOKEN | ENTROPY),
    "trapo": {**UNCLIPPED, **POOLED, "demo_weight": DemoWeight.TRUST, "demo_shape": 0.3},
    "prefix-rft": {**SHAPED, **POOLED},
    "srft": {**SHAPED, **PER_TOKEN, "rollout_reduction": "token"},
    "dypo": {**PER_TOKEN, **PER_SEQUENCE},
    "sdar": {"rollout_reduction": "token"},
}
TOKEN_LOSSES = {"asft", "dpo", "ipo", "gspo", "dypo", "sdar", "srft", "prefix-rft"}
POOLED_TERMS, REFERENCE = {"luffy", "trapo", "prefix-rft"}, {"asft"}

OF_PROMPTS, CENTERED = {"demos": "prompt"}, {"advantages": "centered"}
PAIRS = {"from_reference": True, "pairs": True}
SAMPLINGS = {  # for 8 rollouts per prompt
    "dr-grpo": CENTERED,
    **dict.fromkeys(["dpo", "ipo"], PAIRS),
    **dict.fromkeys(["multitask", "superrl"], OF_PROMPTS),
    "luffy": {**OF_PROMPTS, **CENTERED, "stages": (Stage(7),), "demo_in_group": True},
    "srft": {**OF_PROMPTS, "advantages": "std", "demo_in_group": True},
    "hpt": {**OF_PROMPTS, **CENTERED},
    "relift": {**OF_PROMPTS, **CENTERED, "collect": 128},
    "dypo": {**OF_PROMPTS, "groups": True},
    "sdar": {**OF_PROMPTS, "teacher": True},
    "trapo": {
        **OF_PROMPTS,
        **CENTERED,
        "stages": (
            Stage(4, 0.0, math.inf, 0),
            Stage(2, 0.2, 0.5, 1),
            Stage(1, 0.5, 0.7, 1),
            Stage(1, 1.0, 0.9, 1),
        ),
    },
    # names of the methods that compute the length of a prefix
    "uft": {**OF_PROMPTS, "stages": (Stage(8, trained=8, length="hint_tokens"),)},
    "prefix-rft": {
        **OF_PROMPTS,
        **CENTERED,
        "stages": (Stage(7), Stage(1, trained=1, length="prefix_tokens")),
    },
    "gta": {"demo_tokens": 6},
    "sft-best": {"limit_demos": 5000, "epochs": 3},
    "sft-light": {"limit_demos": 1000, "epochs": 1},
}
SOLVERS = ["mgda", "pcgrad", "cagrad", "nash-mtl", "aligned-mtl", "gradnorm", "gta"]
NEEDS = {  # in steps 0, 10 and 15
    **dict.fromkeys(["sft", "sft-light", "sft-best", "dft", "asft"], 3 * [{"rollouts": False}]),
    **dict.fromkeys(["grpo", "dr-grpo", "dapo", "gspo"], 3 * [{"demos": False}]),
    "sft-then-rl": [{"rollouts": False}, {"demos": False}, {"demos": False}],
    **dict.fromkeys(["dpo", "ipo"], 3 * [{"demos": False, "kl": True}]),
    **dict.fromkeys(["kl-ctrl", "dypo"], 3 * [{"kl": True}]),
    **dict.fromkeys(SOLVERS, 3 * [{"parts": 1}]),
    "sdmgrad": 3 * [{"parts": 2}],
    "gradnorm-ctrl": [{"parts": 1}, {"parts": 1}, {}],
    # the rate is 0.1 / sqrt(step + 1)
    "moco": [{"parts": 1, "average": 0.1 / math.sqrt(n)} for n in (1, 11, 16)],
    "famo": 3 * [{"losses_after": True}],
    "amft": [{"rollouts": False}, {}, {"parts": 2}],
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_asks_for(name: str) -> None:
    weight = DemoWeight.P if hasattr(METHODS[name], "weight") else None
    method = METHODS[name](**FIELDS.get(name, {}) | ({"weight": weight} if weight else {}))
    spec = replace(BASE, **{"demo_weight": weight or BASE.demo_weight} | SPECS.get(name, {}))
    token = method.token_loss if name in TOKEN_LOSSES else None
    assert method.loss(BASE) == Loss(spec, token, name in POOLED_TERMS, name in REFERENCE)
    sampling = Sampling(**SAMPLINGS.get(name, {}))
    stages = [s._replace(length=s.length and getattr(method, s.length)) for s in sampling.stages]
    assert method.sampling(8) == replace(sampling, stages=tuple(stages))
    if not name.startswith(("gac", "oracle")):  # see test_kl_is_measured_whenever_alpha_is_updated
        needs = [StepNeeds(**changes) for changes in NEEDS.get(name, 3 * [{}])]
        assert [method.needs(step) for step in (0, 10, 15)] == needs


def test_a_preset_is_the_same_class_with_other_defaults() -> None:
    kind = preset(Constant, "much-sft", "Mostly SFT.", mu=0.75, source="a test")
    assert (kind.__name__, kind.name, kind.__doc__) == ("MuchSft", "much-sft", "Mostly SFT.")
    assert (kind.source, kind.family, kind.__module__) == (
        "a test",
        "schedule",
        Constant.__module__,
    )
    assert kind() == kind(mu=0.75) != kind(weight=DemoWeight.P) and issubclass(kind, Constant)
    assert pickle.loads(pickle.dumps(kind(mu=0.5))) == kind(mu=0.5)
    with pytest.raises(FrozenInstanceError):
        kind().mu = 0.5
    with pytest.raises(ValueError, match="mu=2: use"):
        kind(mu=2)
    with pytest.raises(TypeError, match=r"^muu=1: Constant has no such field or attribute$"):
        preset(Constant, "other", "A typing error.", muu=1)
    changed = choose(METHODS, {"name": "gac-prior-low", "prior": {"name": "random"}})
    assert changed.prior == RandomPrior()


def test_the_list_of_methods_is_wrapped(monkeypatch) -> None:
    class First(Constant):
        """Has a short name.

        This paragraph is not shown.
        """

        family, source, cost = "one", "x", f"{30 * 'a'} {80 * 'b'} {12 * 'c'} d"

    class Second(First):
        """Is in another family."""

        family, cost = "two", "none"

    monkeypatch.setattr("gac.methods.listing.METHODS", {"a": First, "name": Second, "b": First})
    for method, name in ((First, "a"), (Second, "name")):
        monkeypatch.setattr(method, "name", name)
    first = f"""\
  a     Has a short name. [x] Needs: rollouts, demonstrations. Extra: {30 * "a"}
        {80 * "b"}
        {12 * "c"} d."""
    second = "  name  Is in another family. [x] Needs: rollouts, demonstrations."
    assert methods_table() == f"one:\n{first}\n{first}\ntwo:\n{second}"


def test_methods_can_be_pickled() -> None:
    for name in METHODS:
        assert replace(METHODS[name]()) == METHODS[name]()
        assert pickle.loads(pickle.dumps(METHODS[name]())) == METHODS[name]()


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": (4, 4)},
        {"sizes": (), "prefixes": (), "below": (), "trained": ()},
        {"sizes": (8, 0, 1, 1)},
        {"prefixes": (0.0, 0.2, 0.5, 1.1)},
        {"prefixes": (0.0, -0.1, 0.5, 1.0)},
    ],
)
def test_trapo_names_invalid_groups(fields) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: use ")):
        METHODS["trapo"](**fields)
    with pytest.raises(ValueError, match=r"rollouts\.num_generations=9: use 8, the sum"):
        METHODS["trapo"]().sampling(9)
