"""What each method asks of the trainer: its loss, its sampling and its needs."""

import math
import pickle
import re
from dataclasses import FrozenInstanceError, replace

import pytest

from gac.methods import METHODS
from gac.methods.base import preset
from gac.methods.constant import Constant
from gac.methods.listing import methods_table
from gac.types import Sampling, Stage, StepNeeds
from gac_kernels import DemoWeight, LossSpec

OF_PROMPTS, CENTERED = {"demos": "prompt"}, {"advantages": "centered"}
PAIRS = {"from_reference": True, "pairs": True}
SAMPLINGS = {  # for 8 rollouts per prompt
    "dr-grpo": CENTERED,
    **dict.fromkeys(["dpo", "ipo"], PAIRS),
    **dict.fromkeys(["multitask", "superrl", "routing"], OF_PROMPTS),
    "luffy": {**OF_PROMPTS, **CENTERED, "stages": (Stage(7),), "demo_in_group": True},
    "srft": {**OF_PROMPTS, "advantages": "std", "demo_in_group": True},
    "hpt": {**OF_PROMPTS, **CENTERED},
    "relift": {**OF_PROMPTS, **CENTERED, "collect": 128},
    "dypo": {**OF_PROMPTS, "groups": True},
    "sdar": {**OF_PROMPTS, "teacher": True},
    "opd": {"uses_rewards": False},
    "sdft": {**OF_PROMPTS, "teacher": True, "uses_rewards": False},
    "sdpg": {**OF_PROMPTS, "teacher": True},
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
NEEDS = {  # in steps 0, 10 and 15
    "sft-then-rl": [{"rollouts": False}, {"demos": False}, {"demos": False}],
    "gradnorm-ctrl": [{"parts": 1}, {"parts": 1}, {}],
    "amft": [{"rollouts": False}, {}, {"parts": 2}],
}
FIELDS = {
    "gta": {"guess_tokens": 6},
    "amft": {"warmup": 3, "update_every": 12},
    "sft-then-rl": {"sft_steps": 10},
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_asks_for(name: str) -> None:
    method = METHODS[name](**FIELDS.get(name, {}))
    sampling = Sampling(**SAMPLINGS.get(name, {}))
    stages = [s._replace(length=s.length and getattr(method, s.length)) for s in sampling.stages]
    assert method.sampling(8) == replace(sampling, stages=tuple(stages))
    assert name != "sft-then-rl" or replace(method, mu=0.3).needs(10) == StepNeeds()
    if name in NEEDS:
        assert [method.needs(step) for step in (0, 10, 15)] == [StepNeeds(**x) for x in NEEDS[name]]
    if hasattr(method, "weight") and method.loss(LossSpec(max_tokens=9)).token is None:
        other = replace(method, weight=DemoWeight.P)
        assert other.loss(LossSpec(max_tokens=9)).spec.demo_weight is DemoWeight.P


def test_a_preset_is_the_same_class_with_other_defaults() -> None:
    kind = preset(Constant, "much-sft", "Mostly SFT.", mu=0.75, source="a test")
    assert (kind.__name__, kind.name, kind.__doc__) == ("MuchSft", "much-sft", "Mostly SFT.")
    assert (kind.source, kind.family, kind.__module__) == (
        "a test",
        "schedule",
        Constant.__module__,
    )
    assert kind() == kind(mu=0.75) != kind(weight=DemoWeight.P)
    assert issubclass(kind, Constant)
    assert pickle.loads(pickle.dumps(kind(mu=0.5))) == kind(mu=0.5)
    with pytest.raises(FrozenInstanceError):
        kind().mu = 0.5
    with pytest.raises(ValueError, match="mu=2: use"):
        kind(mu=2)
    with pytest.raises(TypeError, match=r"^muu=1: Constant has no such field or attribute$"):
        preset(Constant, "other", "A typing error.", muu=1)


def test_the_list_names_each_method_once_and_all_can_be_pickled() -> None:
    lines = methods_table().splitlines()
    assert max(map(len, lines)) <= 100
    assert sorted(line.split()[0] for line in lines if re.match("  [^ ]", line)) == sorted(METHODS)
    assert {x for x in lines if x[0] != " "} == {f"{x.family}:" for x in METHODS.values()}
    costs = re.findall(r"Extra: (.*?)\.(?= |$)", " ".join(" ".join(lines).split()))
    assert {"none", *costs} == {method.cost for method in METHODS.values()}
    for method in (kind() for kind in METHODS.values()):
        assert pickle.loads(pickle.dumps(method)) == replace(method) == method
