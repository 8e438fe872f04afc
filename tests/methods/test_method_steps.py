"""Methods over several steps, with numbers computed by hand."""

import copy
import json
import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from gac.control.alarm import Alarm
from gac.control.controller import ControllerConfig, GuidedController
from gac.control.gate import Gate
from gac.control.schedules import Prior
from gac.control.signals import (
    Alignment,
    GradientSignals,
    ProxySignals,
    Reading,
    SourceNeeds,
)
from gac.methods import METHODS, Mix, Observation
from gac.methods.advantages import group_credit
from gac.methods.base import Method
from gac.methods.loss_weights import positive_losses
from gac.methods.solvers import Gram, GramSolver
from gac.step_end import demo_losses, next_mix
from gac.types import Corrections, Evidence, StepNeeds, TermPair
from gac_kernels import DemoWeight, Signals


@dataclass(frozen=True)
class Counted:
    """A source whose readings differ in each step."""

    needs: SourceNeeds = SourceNeeds(gram=True, bias=True)

    def init(self) -> dict[str, int]:
        return {"read": 0}

    def read(self, evidence: Evidence, state: dict[str, int]) -> tuple[Reading, dict[str, int]]:
        n = state["read"] + 1
        corrections, alignment = Corrections(0.1, 0.2, 0.3, 0.4), Alignment(1.0, 4.0, 9.0, n)
        return Reading(Signals(0.1 * n, 0.5, 2.0), corrections, alignment), {"read": n}


GUARDED = {"gate": Gate("z", decay=0.5), "alarm": Alarm(), "estimator": "biased"}


def test_gac_passes_its_measurements_to_the_controller_and_reports_them() -> None:
    method = METHODS["gac"](signals=Counted(), update_every=1, **GUARDED)
    controller = GuidedController(ControllerConfig(update_every=1, **GUARDED))
    state, mix = method.mix(method.init(), Observation(0))
    assert mix == Mix(controller.update())
    unread = {"read_sft_variance": None, "read_rl_variance": None, "read_disagreement": None}
    assert method.report(state).items() >= unread.items()
    messages = []
    for step in range(1, 40):
        losses = 5.0 if step > 36 else 1 + 0.1 * (step % 3), 0.9
        last = Observation(step, kl=0.05, demo_loss=3.0, demo_losses=losses)
        signals = corrections = alignment = None
        if step % 2:
            last = replace(last, evidence=Evidence(step))
            (signals, corrections, alignment), _ = Counted().read(None, {"read": step // 2})
            read = [f"read_{name}" for name in Signals._fields], signals
        mu = controller.update(signals, 0.05, corrections, alignment, 3.0, losses)
        before, (state, mix) = state, method.mix(state, last)
        expected, gate = controller.state_dict(), controller.state.gate
        assert mix == Mix(mu)
        assert state["controller"] == expected
        assert method.report(state) == {
            **{name: expected[name] for name in ("mu_star", "prior", "alpha", "alpha_step")},
            **{f"average_{name}": expected[name] for name in ("kl", *Signals._fields)},
            **{name: getattr(gate, name) for name in ("trust", "cosine", "z")},
            "demos_suspect": float(expected["alarm"]["suspect"]),
            **dict(zip(*read, strict=True)),
            "read_gamma": None,  # the evidence has no biases
        }
        messages.append(method.log_message(before, state))
        assert (before["read"] != state["read"]) == step % 2  # the state before is not changed
    saturated, text = filter(None, messages)  # every KL is above its target
    assert saturated.startswith("the controller is saturated")
    assert text.startswith("the demonstration loss jumped to 2.95")
    assert messages[37] == text
    assert method.log_message(state, state) is None


def test_gac_needs_its_signals_on_refresh_steps() -> None:
    method = METHODS["gac"](signals=Counted(), update_every=4, gradient_parts=3, **GUARDED)
    refresh = StepNeeds(
        kl=True, kl_optional=True, kl_trigger=True, signals=True, parts=3, bias=True
    )
    assert [t for t in range(9) if method.needs(t) == refresh] == [0, 3, 7]
    assert [t for t in range(9) if method.needs(t) == StepNeeds()] == [1, 2, 4, 5, 6, 8]
    plain = METHODS["gac"](signals=ProxySignals(trim=0.3), alpha_every="step")
    assert plain.needs(0) == StepNeeds(
        kl=True, kl_optional=True, kl_trigger=True, signals=True, trim=0.3
    )
    assert plain.needs(1) == StepNeeds(kl=True, kl_optional=True, kl_trigger=True, trim=0.3)


ORTHOGONAL = 4.0, 0.0, 1.0
OPTIONS = [  # name, fields, <s, s>, <s, r> and <r, r>, weights in the fourth step
    ("nash-mtl", {"max_norm": None, "scale": 3.0}, ORTHOGONAL, (1.5, 3.0)),
    ("gradnorm-ctrl", {}, (0.01, 0.0, 0.09), (0.25, 0.75)),
    ("gradnorm-ctrl", {}, (0.0, 0.0, 0.0), (0.5, 0.5)),
    ("gradnorm-ctrl", {"invert": True}, (9.0, 0.0, 1.0), (0.25, 0.75)),
    ("gta", {"sft_coef": 0.5, "rl_coef": 2.0}, ORTHOGONAL, (0.5, 2.0)),
    ("gta", {"sft_coef": 0.5, "rl_coef": 2.0}, (4.0, -0.5, 1.0), (0.0, 2.0)),
]


@pytest.mark.parametrize(("name", "fields", "products", "expected"), OPTIONS)
def test_options_of_gradient_solvers(name: str, fields, products, expected) -> None:
    method = METHODS[name](**fields)
    state, mix = method.mix(method.init(), Observation(3))
    a, b, c = products
    gram = torch.tensor([[a, b], [b, c]], dtype=torch.float64).kron(torch.ones(2, 2))
    assert method.solve(state, gram, mix)[1] == pytest.approx(expected)


class Fastidious(GramSolver):
    """Has no weights for conflicting gradients."""

    def closed_form(self, gram: Gram) -> tuple[float, float] | None:
        return None if gram.dot < 0 else (gram.sft, gram.rl)


def test_solvers_count_the_steps_that_they_skip() -> None:
    method, unknown = Fastidious(), torch.full((2, 2), math.nan)
    state, weights = method.solve(method.init(), unknown, Mix(0.5))
    assert weights is None
    assert method.report(state) == {"cosine": None, "solver_skipped": 1}
    assert method.mix(state, Observation(1)) == (state, Mix(0.5))
    opposite = torch.tensor([[4.0, -6.0], [-6.0, 9.0]], dtype=torch.float64)
    state, weights = method.solve(state, opposite, Mix(0.5))
    assert weights is None
    assert method.report(state) == {"cosine": -1.0, "solver_skipped": 2}
    state, weights = method.solve(state, opposite.abs(), Mix(0.5))
    assert weights == (4.0, 9.0)
    assert method.report(state) == {"cosine": 1.0, "solver_skipped": 2}
    assert Fastidious(unit_rl=True).solve(state, opposite.abs(), Mix(0.5))[1] == (4.0, 1 / 3)
    halves = METHODS["sdmgrad"]()
    state, weights = halves.solve(halves.init(), torch.full((4, 4), math.nan), Mix(0.5))
    assert weights is None
    assert state == {**halves.init(), "skipped": 1}
    state, _ = halves.solve(state, opposite.kron(torch.ones(2, 2)), Mix(0.5))
    assert halves.report(state) == {"cosine": -1.0, "solver_skipped": 1}


@dataclass(frozen=True)
class Talkative(Method):
    """Its message tells how its state changes."""

    def mix(self, state: dict[str, int], last: Observation) -> tuple[dict[str, int], Mix]:
        return {"n": state["n"] + 1}, Mix(0.25)

    def log_message(self, before: dict[str, int], after: dict[str, int]) -> str | None:
        return f"{before} {after}" if after["n"] < 9 else None


def test_only_the_first_rank_logs_the_message_of_a_method(caplog, monkeypatch) -> None:
    assert next_mix(Talkative(), {"n": 5}, Observation(7)) == ({"n": 6}, Mix(0.25))
    assert next_mix(Talkative(), {"n": 8}, Observation(8)) == ({"n": 9}, Mix(0.25))
    monkeypatch.setattr("gac.step_end.rank", lambda: 1)
    assert next_mix(Talkative(), {"n": 6}, Observation(9)) == ({"n": 7}, Mix(0.25))
    assert caplog.messages == ["step 8: {'n': 5} {'n': 6}"]


CORRECT = "hpt", "superrl", "relift", "dypo", "srft"  # methods that count correct rollouts


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sdmgrad", {"unit_rl": True}),
        ("gradnorm-ctrl", {"unit_rl": True}),
        ("kl-ctrl", {"sign": 0}),
        *(("kl-ctrl", {key: x}) for key, x in (("mu_min", -0.1), ("mu_init", 0.99), ("mu_max", 2))),
        ("kl-ctrl", {"mu_init": 1.0, "mu_max": 1.0}),
        ("kl-ctrl", {"mu_init": 0.0, "mu_min": 0.0, "sign": -1}),
        *(("amft", {key: x}) for key in ("meta_lr", "entropy_lr") for x in (math.nan, math.inf)),
        *(("sdar", {"coef": x}) for x in (math.nan, math.inf)),
        ("amft", {"mu_min": -0.1}),
        ("amft", {"mu_init": 0.99}),
        ("amft", {"mu_max": 1.1}),
        ("trapo", {"sizes": (4, 4)}),
        ("trapo", {"sizes": (), "prefixes": (), "below": (), "trained": ()}),
        ("trapo", {"sizes": (8, 0, 1, 1)}),
        ("trapo", {"prefixes": (0.0, 0.2, 0.5, 1.1)}),
        ("trapo", {"prefixes": (0.0, -0.1, 0.5, 1.0)}),
        *(("trapo", {"trained": (0, x, 1, 1)}) for x in (3, -1)),
        *(("hpt", {"table": x}) for x in ((), (0.5, 1.1), (-0.1,))),
        ("hpt", {"switch": 1, "table": (1.0, 0.0)}),
        ("luffy", {"shape": 0.2, "weight": DemoWeight.PHI}),
        *(("luffy", {"shape": x}) for x in (0, math.nan)),
        *(("srft", {"shape": x}) for x in (0, -0.1)),
        *((name, {"correct": math.nan}) for name in CORRECT),
        ("reward-threshold", {"threshold": math.nan}),
        *(("asft", {"kl_weight": x}) for x in (math.nan, -0.1)),
        ("famo", {"rollout_floor": math.nan}),
        ("sft-light", {"patience": 0}),
        ("sft-light", {"decay": 1.5}),
        *(("gta", {"guess_tokens": x}) for x in (0, -3)),
        *(("dapo", {"clip_low": x}) for x in (2.0, -0.1)),
        ("gspo", {"clip_high": -0.1}),
        ("gac", {"gradient_parts": 3}),
        ("gac", {"ema_decay": 0.9, "ema": "none"}),
        ("gac", {"prior": Prior(0.5), "prior_blend": 1}),
        ("gac", {"early_steps": 9}),
        ("gac", {"gate": Gate()}),
        ("gac", {"estimator": "biased"}),
        ("gac", {"estimator": "correlated", "signals": GradientSignals(bias=True)}),
        ("gac", {"estimator": "biased_paper", "signals": GradientSignals(paired=True)}),
    ],
)
def test_invalid_options_are_named(name: str, fields) -> None:
    field, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}") + ".*(use|set|remove) "):
        METHODS[name](**fields)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"estimator": "correlated", "signals": GradientSignals(paired=True)}, {}),
        ({"estimator": "biased", "signals": GradientSignals(bias=True)}, {"gradient_parts": 3}),
        ({"ema": "literal"}, {"ema_decay": 0.9}),
        ({"early_update_every": 2}, {"early_steps": 9}),
        ({"prior_blend": 0.9}, {"prior": Prior(0.5)}),
    ],
)
def test_options_that_act_with_others_are_accepted(fields, changes) -> None:
    assert METHODS["gac"](**fields, **changes)


@pytest.mark.parametrize(
    ("name", "fields", "valid", "invalid", "message"),
    [
        *((name, {}, 2, 1, "num_generations=1: use 2") for name in ("luffy", "prefix-rft")),
        ("trapo", {}, 8, 9, r"rollouts\.num_generations=9: use 8, the sum"),
        ("hpt", {"table": (1.0, 0.5, 0.0)}, 2, 3, r"table=\(1\.0, 0\.5, 0\.0\): use 4 numbers"),
        ("hpt", {"table": (1.0, 0.5, 0.0)}, 2, 1, r"table=\(1\.0, 0\.5, 0\.0\): use 2 numbers"),
    ],
)
def test_numbers_of_rollouts_are_checked(name, fields, valid, invalid, message) -> None:
    assert METHODS[name](**fields).sampling(valid)
    with pytest.raises(ValueError, match=message):
        METHODS[name](**fields).sampling(invalid)


@pytest.mark.parametrize("name", ["uncertainty", "dwa", "gradnorm"])
@pytest.mark.parametrize(
    "measured",
    [{"demo_loss": 2.0}, {"reward_mean": 0.5}, {"demo_loss": math.nan, "reward_mean": 0.5}, {}],
)
def test_a_step_without_one_of_the_losses_does_not_count(name: str, measured) -> None:
    method = METHODS[name]()
    assert method.mix(method.init(), Observation(0, **measured))[1].mu == 0.5
    before = method.mix(method.init(), Observation(1, demo_loss=2.0, reward_mean=0.25))
    assert method.mix(before[0], Observation(2, **measured)) == before


def test_losses_are_those_of_demonstrations_and_at_least_a_thousandth() -> None:
    moments = SimpleNamespace(demo_nll=torch.tensor([1.5, math.nan, 0.5, math.inf]))
    assert demo_losses(moments) == (1.5, 0.5)
    assert demo_losses(SimpleNamespace(demo_nll=torch.tensor([math.nan]))) is None
    assert positive_losses(Observation(1, demo_loss=-2.0, reward_mean=1.5)) == (0.001, 0.001)
    assert positive_losses(Observation(1, demo_loss=2.0, reward_mean=0.25)) == (2.0, 0.75)


@pytest.mark.parametrize("name", METHODS)
def test_states_are_plain_json_and_never_changed_in_place(name: str) -> None:
    method = METHODS[name]()
    state = method.init()
    rows = torch.randn(8, 3, dtype=torch.float64)
    moments = Signals(0.5, 2.0, 1.5), Corrections(0.1)
    losses = TermPair(1.0, -0.5), TermPair(0.9, -0.6), (0.8, 1.2)
    for step in range(60):
        last = Observation(
            step, *moments[:1], 0.03, 1.5 - 0.01 * step, 0.4, 0.2, -0.5, 1.0, moments[1]
        )
        last = replace(last, losses_before=losses[0], losses_after=losses[1], demo_losses=losses[2])
        last = replace(last, lr=0.1, losses_by_source={"a": [0.8], "b": [1.2]} if step > 30 else {})
        before = copy.deepcopy(state)
        after, mix = method.mix(state, last if step else Observation(0))
        assert state == before
        parts = 2 * method.needs(step).parts
        if parts:
            before, gram = copy.deepcopy(after), rows[:parts] @ rows[:parts].T
            solved, _ = method.solve(after, gram, mix)
            assert after == before
            after = solved
        state = json.loads(json.dumps(after))
        assert state == after


CHANGED = {  # fields of the credit that are not those of the group
    **dict.fromkeys(["hpt", "superrl", "routing", "dypo"], ("rollout_weight", "demo_weight")),
    **dict.fromkeys(["relift", "sdar", "sdpg"], ("demo_weight",)),
    **dict.fromkeys(["opd", "sdft"], ("rollouts", "demo_weight")),
    "srft": ("rollouts",),
}


@pytest.mark.parametrize("name", METHODS)
def test_advantages_are_those_of_the_group(name: str) -> None:
    rewards = torch.tensor([[0.25, 1.0, 0.0], [0.5, 0.0, math.nan]])
    for kind, demos in (("std", None), ("centered", torch.tensor([1.0, 0.75]))):
        expected = group_credit(rewards, demos, kind)._asdict()
        for field, value in METHODS[name]().credit(rewards, demos, kind)._asdict().items():
            assert field in CHANGED.get(name, ()) or torch.equal(value, expected[field]), field
    for name in ("sdar", "opd", "sdft", "sdpg"):
        credit = METHODS[name]().credit(rewards, None, kind)
        assert credit.demo_weight.tolist() == [0.0, 0.0]
        assert credit.rollouts.any() == (name in ("sdar", "sdpg"))


def test_the_weight_of_kdrl_falls_linearly() -> None:
    method = METHODS["kdrl"](coef=0.5, final_coef=0.1).for_run(8)
    weights = [method.mix({}, Observation(step))[1].teacher for step in (0, 2, 8, 9)]
    assert weights == pytest.approx([0.5, 0.4, 0.1, 0.1])
    shorter = METHODS["kdrl"](coef=0.5, final_coef=0.1, anneal_steps=4).for_run(8)
    assert shorter.mix({}, Observation(2))[1].teacher == pytest.approx(0.3)


@pytest.mark.parametrize("name", CORRECT)
def test_a_rollout_is_correct_above_the_limit(name: str) -> None:
    rewards = torch.tensor([[0.25, 0.0, math.nan], [0.5, 0.25, math.nan], [math.nan] * 3]).double()
    credit = METHODS[name](correct=0.25).credit(rewards, None, "centered")
    if name == "srft":
        assert credit.rollouts.tolist() == [[-1.0, -1.0, 0.0], [1.0, -1.0, 0.0], [0.0] * 3]
    else:
        assert credit.demo_weight.tolist() == [1.0, 0.0, 0.0]  # nothing is known of the last prompt
        assert credit.rollout_weight.tolist()[:2] == [float(name == "relift"), 1.0]


def test_superrl_replaces_groups_without_a_reward() -> None:
    rewards = torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.0, torch.nan]])
    credit = METHODS["superrl"]().credit(rewards, None, "centered")
    assert [x.tolist() for x in credit[2:]] == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    more = torch.cat([rewards, torch.zeros(1, 2)])  # one more unsolved prompt
    routed = METHODS["routing"]().credit(more, None, "centered")
    assert torch.allclose(routed.rollout_weight, torch.tensor([0.0, 1 / 4, 0.0, 0.0]))
    assert torch.allclose(routed.demo_weight, torch.tensor([3 / 4, 0.0, 3 / 4, 3 / 4]))
    for name in ("superrl", "routing"):
        assert METHODS[name]().mix({}, Observation(0))[1].pair == (1.0, 1.0)
