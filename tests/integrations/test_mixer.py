"""Mixer, which the adapters share: sums, data order, state, and rejected arguments."""

import contextlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.normalizers import Strip
from tokenizers.processors import TemplateProcessing

from gac import ControllerConfig, GuidedController, Mixer
from gac.control.gate import Gate
from gac.control.schedules import MixSchedule
from gac.control.signals import GradientSignals, SourceNeeds
from gac.demo.task import make_tokenizer
from gac.integrations.demonstrations import encode
from gac.integrations.hf_trainer import unsupported_options
from gac.methods import CHORD, GAC, METHODS, Constant
from gac.methods.base import Loss, Method
from gac.methods.teacher import TeacherConfig
from gac.mixer import MEASURED, refuse, resolve_method, teacher_term
from gac.types import Mix, Observation, State, StepNeeds
from gac_kernels import LossSpec, TokenMoments, loss_from_logprobs
from tests import ranks


@dataclass(frozen=True)
class Choosy(Method):
    """A user's method that changes the loss of the rollouts."""

    clip: float = 0.2

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, clip_high=self.clip))

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.5)


def moments(
    seed: int, *, demo: bool, ref: bool = True, rows: int = 6, entropy: float | None = None
) -> TokenMoments:
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(rows, 5, generator=generator)
    computed = loss_from_logprobs(
        logps,
        torch.ones(rows, 5, dtype=torch.int64),
        torch.randn(rows, generator=generator),
        torch.full((rows,), demo),
        ref_logps=logps - 0.1 if ref and not demo else None,
        entropy=None if entropy is None else torch.full_like(logps, entropy),
        mu=0.5,
    ).moments
    assert computed is not None
    return computed


def step(mixer: Mixer, seed: int) -> dict[str, float]:
    mixer.draw()
    mixer.observe(moments(seed, demo=False))
    mixer.observe(moments(seed + 1, demo=True))
    mixer.weight_rollout_loss(torch.tensor(1.0))
    mixer.weight_demo_loss(torch.tensor(2.0))
    return mixer.close()


def test_mu_matches_the_controller():
    config = ControllerConfig(update_every=2)
    mixer, controller = Mixer(config, rows=9, batch=6), GuidedController(config)
    inputs: tuple[Any, Any] = (None, None)
    for t in range(7):
        assert mixer.mu == controller.update(*inputs)
        log = step(mixer, t)
        total = moments(t, demo=False) + moments(t + 1, demo=True)
        refresh = t == 0 or config.is_refresh(t + 1)
        assert log["kl"] == pytest.approx(math.exp(-0.1) + 0.1 - 1, rel=1e-5)
        inputs = (total.signals() if refresh else None, log["kl"])
        assert log["mu"] == controller.mu
        assert log["alpha"] == controller.alpha
        assert log["mu_star"] == controller.mu_star
        assert log["prior"] == controller.prior


def test_the_loss_is_the_mixture_and_its_parts_are_logged():
    mixer = Mixer(Constant(mu=0.25), rows=4, batch=12)
    parts = [torch.tensor(x, requires_grad=True) for x in (1.0, 10.0)]
    for _ in range(2):
        loss = mixer.weight_rollout_loss(parts[0]) + mixer.weight_demo_loss(parts[1])
        assert loss.item() == 0.75 * 1 + 0.25 * 10
        mixer.observe(moments(0, demo=True))
    for large in (2e8, 1.0, -2e8):
        mixer.weight_rollout_loss(torch.tensor(large))
    assert [g.item() for g in torch.autograd.grad(loss, parts)] == [0.75, 0.25]
    log = mixer.close()
    assert (log["rollout_loss"], log["demo_loss"], log["demo_tokens"]) == (3, 20, 60)
    assert not {"kl", "rl_variance", "disagreement"} & set(log)  # no rollout was seen
    mixer.observe(moments(0, demo=False))
    mixer.observe(moments(1, demo=False, ref=False))  # a batch without the KL
    assert "kl" not in mixer.close()


def test_schedule_and_demo_weight_come_from_the_method():
    schedule = MixSchedule.chord_mu()
    mixer = Mixer(CHORD(schedule=schedule), rows=4, batch=6)
    assert [step(mixer, t)["mu"] for t in range(4)] == [schedule(t) for t in range(4)]
    assert Mixer(GAC(weight="p"), rows=4, batch=1).spec.demo_weight.value == "p"
    assert Mixer(Constant(), rows=4, batch=1).spec == LossSpec(demo_weight="one")


def test_state_round_trip_resumes_exactly(tmp_path: Path):
    first = Mixer(GAC(update_every=2), rows=9, batch=6, seed=5)
    for t in range(3):
        step(first, t)
    first.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gac.json"]
    assert first.state_dict()["step"] == 3
    assert first.state_dict()["order"]["position"] == 18
    second = Mixer(GAC(update_every=2), rows=9, batch=6, seed=5)
    second.load(tmp_path)
    assert json.loads((tmp_path / "gac.json").read_text()) == second.state_dict()
    assert second.draw() == first.draw()
    for t in range(3, 8):
        assert step(second, t) == step(first, t)


def test_state_of_another_run_is_rejected(tmp_path: Path):
    mixer = Mixer(GAC(), rows=9, batch=6)
    saved = mixer.state_dict()
    with pytest.raises(FileNotFoundError, match="gac.json is missing: .* without a controller"):
        mixer.load(tmp_path)
    without_mix = {k: v for k, v in saved.items() if k != "mix"}
    for other, state, message in (
        (Mixer(Constant(), rows=9, batch=6), saved, "'gac'.* 'constant': resume with the same con"),
        (Mixer(GAC(), rows=8, batch=6), saved, "number of rows is 8, .* 9: resume"),
        (mixer, without_mix, r"state=\['mix'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)


def test_a_teacher_has_a_weight_of_its_own():
    """`teacher_term` against float64, and its sum over the micro-batches of a step."""
    teacher = TeacherConfig(loss="k3", coef=0.5)
    mixer = Mixer(Constant(mu=1.0), rows=4, batch=6, teacher=teacher)
    g = torch.Generator().manual_seed(0)
    logps, other = (-3 * torch.rand(6, 5, generator=g) for _ in range(2))
    mask, other[1, 2] = torch.rand(6, 5, generator=g) < 0.7, math.nan
    logps.requires_grad_()
    known = mask & ~other.isnan()
    assert known.sum() < mask.sum()
    exact = logps.detach().double().requires_grad_()
    gap = (other.double() - exact)[known]
    for reduction, norm in (("token", 3), ("sequence", 2.5)):
        loss = teacher_term(logps, mask, other, loss=teacher.loss, reduction=reduction, norm=norm)
        terms = torch.zeros_like(exact).masked_scatter(known, gap.expm1() - gap)
        per_row = terms.sum(1) / known.sum(1) if reduction == "sequence" else terms.sum(1)
        expected = per_row.sum() / norm
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        ours, theirs = (
            torch.autograd.grad(x, leaf, retain_graph=True)[0]
            for x, leaf in ((mixer.weight_teacher_loss(loss), logps), (0.5 * expected, exact))
        )
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-7)
    mixer.observe(moments(0, demo=False))
    logged = mixer.close()["teacher_loss"]
    assert logged == pytest.approx(
        sum(
            teacher_term(logps, mask, other, loss="k3", reduction=r, norm=n).item()
            for r, n in (("token", 3), ("sequence", 2.5))
        )
    )
    mixer.observe(moments(0, demo=False))
    with pytest.raises(RuntimeError, match=r"^teacher=k3: .* weight_teacher_loss\(\)"):
        mixer.close()
    with pytest.raises(ValueError, match="^teacher=None: "):
        Mixer(rows=4, batch=6).weight_teacher_loss(torch.tensor(1.0))


@dataclass(frozen=True)
class Fading(Constant):
    """Sets the teacher's loss and its weight."""

    def teacher(self, base: TeacherConfig) -> TeacherConfig:
        return replace(base, loss="k2")

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.5, teacher=1 / (1 + last.step))


def test_a_method_sets_the_teachers_loss_and_weight():
    mixer = Mixer(Fading(), rows=9, batch=6, teacher=TeacherConfig())
    assert mixer.teacher is not None
    assert mixer.teacher.loss == "k2"
    weights = []
    for t in range(3):
        weights.append(mixer.teacher_coef)
        mixer.weight_teacher_loss(torch.tensor(1.0))
        step(mixer, t)
    assert weights == [1, 1 / 2, 1 / 3]
    assert Mixer(Fading(), rows=9, batch=6).teacher_coef == 0


REFUSED = {
    "a model": ({"path": "x"}, Constant(), "teacher.path='x': another trainer scores"),
    "the policy itself": ({"self": True}, Constant(), "teacher.self=True: another trainer"),
    "the method's own": ({"loss": "k3"}, Fading(), "teacher.loss='k3': .* sets it to 'k2'"),
    "hidden states": ({"top_k": None}, Constant(), "teacher.top_k=None: .* use a number"),
    "a loss without a mean gradient": ({"loss": "k1"}, Constant(), "loss='k1'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_teacher_that_cannot_be_is_refused(name: str):
    keys, method, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        Mixer(method, rows=9, batch=6, teacher=TeacherConfig(**keys))
    assert "\n" not in str(error.value)


def test_a_teacher_must_be_described():
    for value in ("k2", True):
        with pytest.raises(ValueError, match=rf"^teacher={value!r}: use a .*TeacherConfig"):
            Mixer(Constant(), rows=9, batch=6, teacher=value)


class Taught(Constant):
    """Mixes three signals."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(teacher=True)


BIAS = SimpleNamespace(needs=SourceNeeds(bias=True))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"batch": 0}, "batch=0: use a number of demonstrations >= 1"),
        ({"rows": 0}, "the dataset is empty"),
        ({"controller": "gac"}, "controller='gac': use a ControllerConfig or a method"),
        *(
            (
                {"controller": METHODS[name]()},
                rf"controller={name} needs .*\({why}\).* use a .* gac",
            )
            for name, why in (
                ("mgda", "parts=1"),
                ("moco", "parts=1"),
                ("famo", "losses_after=True"),
                ("gac-gated", "parts=4"),
                ("reward-threshold", "rewards=True"),
                ("superrl", "credit"),
                ("prefix-rft", "token"),
                ("trapo", "pooled"),
                ("uft", "demos='prompt'"),
                ("multitask", "demos='prompt'"),
            )
        ),
        (
            {"controller": ControllerConfig(gate=Gate())},
            "controller=ControllerConfig needs more .*gate=.* needs the inner product",
        ),
        ({"controller": GAC(signals=GradientSignals())}, r"controller=gac needs .* \(parts=4\)"),
        (
            {"controller": ControllerConfig(estimator="correlated")},
            "controller=ControllerConfig needs .* estimator='correlated'",
        ),
        (
            {"controller": GAC(estimator="biased", signals=BIAS)},
            r"controller=gac needs .* \(bias=True\)",
        ),
        ({"controller": Choosy(clip=0.3)}, r"controller=Choosy needs .* \(clip_high=0.3\)"),
        ({"controller": Taught()}, r"controller=Taught needs a teacher's .* \(teacher=True\)"),
        ({"controller": METHODS["sft-then-rl"]()}, "trains on only demonstrations in some steps"),
    ],
)
def test_unsupported_arguments_are_rejected(keywords: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as error:
        Mixer(**{"rows": 4, "batch": 2, **keywords})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gac-paper", "constant-alarm", "chord-phi", "kl-ctrl"])
def test_methods_that_need_only_logps_are_supported(name: str):
    mixer = Mixer(METHODS[name](), rows=9, batch=6)
    assert mixer.method.name == name
    assert mixer.state_dict()["order"]["seed"] == 0
    assert all(0 <= step(mixer, t)["mu"] <= 1 for t in range(3))
    mixer.observe(moments(0, demo=True))
    mixer.close()  # without rollouts, nothing is missing
    mixer.observe(moments(0, demo=False, ref=False))
    with (
        pytest.raises(RuntimeError, match="kl-ctrl follows the KL .* not measured")
        if name == "kl-ctrl"
        else contextlib.nullcontext()
    ):
        mixer.close()


WITH_REWARDS = "reward-threshold", "rewvar-ctrl", "uncertainty", "dwa"
ONLY_LOGPS = (
    *("constant", "constant-alarm", "guarded", "hpcd", "wcf", "chord-mu", "chord-phi", "chord"),
    *("kl-ctrl", "gac", "gac-paper"),
)


def test_a_method_is_accepted_if_the_trainer_measures_what_it_needs():
    def accepted(measures: StepNeeds) -> set[str]:
        names = set()
        for name, method in METHODS.items():
            with contextlib.suppress(ValueError):
                resolve_method(method(), measures)
                names.add(name)
        return names

    assert accepted(MEASURED) == {*ONLY_LOGPS}
    assert accepted(MEASURED._replace(kl=False)) == {*ONLY_LOGPS} - {"kl-ctrl"}
    assert accepted(MEASURED._replace(rewards=True)) == {*ONLY_LOGPS, *WITH_REWARDS}


def test_rewards_reach_the_method():
    threshold = METHODS["reward-threshold"](threshold=0.5)
    mixer = Mixer(threshold, rows=9, batch=6, measures=MEASURED._replace(rewards=True))
    assert mixer.mu == 0.5
    mixer.observe_rewards([0.0, 1.0])
    mixer.observe_rewards(torch.tensor([0.0, 0.0]))
    assert "reward_mean" not in step(mixer, 0)
    assert mixer.mu == 0.25
    with pytest.raises(RuntimeError, match=r"reward-threshold needs .* observe_rewards\(\)"):
        step(mixer, 1)


def test_empty_or_oversized_step_is_an_error():
    mixer = Mixer(rows=4, batch=2)
    with pytest.raises(RuntimeError, match=r"call observe\(\)"):
        mixer.close()
    with pytest.raises(ValueError, match="moments=None: call the loss with moments=True"):
        mixer.observe(None)
    mixer.observe(moments(0, demo=True, rows=3))
    with pytest.raises(RuntimeError, match=r"3 demonstrations.* batch=2.* close\(\)"):
        mixer.close()


def _on_a_rank(batch: int) -> tuple[dict[str, float], list[int], str]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    mixer = Mixer(GAC(), rows=20, batch=batch)
    drawn = mixer.draw()
    mixer.observe(moments(rank, demo=False, rows=3 + rank))
    if rank == 0:  # the other rank has no demonstration
        mixer.observe(moments(7, demo=True, rows=4))
    mixer.weight_rollout_loss(torch.tensor(1.0 + rank))
    mixer.weight_demo_loss(torch.tensor(8.0 * (1 - rank)))
    log = mixer.close()
    mismatched = Mixer(Constant(mu=0.1 * (1 + rank)), rows=20, batch=batch)
    mismatched.observe(moments(rank, demo=False))
    with pytest.raises(RuntimeError, match=r"mu differs.* \[0.1, 0.2\]; load") as error:
        mismatched.close()
    alone = [torch.distributed.new_group([other]) for other in range(2)][rank]
    assert mismatched.close(alone)["mu"] == 0.1 * (1 + rank)  # a group of this rank only
    return log, drawn, str(error.value)


@pytest.mark.dist
def test_ranks_close_a_step_together():
    results = ranks.run(_on_a_rank, 5, ranks=2)
    assert results[0] == results[1]
    log = results[0][0]
    total = sum(
        [moments(1, demo=False, rows=4), moments(7, demo=True, rows=4)],
        moments(0, demo=False, rows=3),
    )
    expected = total.signals()._asdict()
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (log["rollout_loss"], log["demo_loss"], log["demo_tokens"]) == (1.5, 4, 20)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({}, None),
        ({"stage": 2}, None),
        ({"stage": 3}, "deepspeed"),
        ({"size": 1}, None),
        ({"size": 2}, "parallelism_config"),
        ({"prompts": [False]}, None),
        ({"prompts": [False, True]}, "peft_config"),
        ({"compile": True}, "torch_compile"),
        ({"reentrant": True}, "gradient_checkpointing_kwargs"),
        ({"reentrant": True, "checkpointing": False}, None),
    ],
)
def test_unsupported_options_of_a_trainer(changes: dict[str, Any], option: str | None) -> None:
    stage, size, reentrant = (changes.get(name) for name in ("stage", "size", "reentrant"))
    plugin = stage and SimpleNamespace(zero_stage=stage)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin),
        parallelism_config=size and SimpleNamespace(non_data_parallel_size=size),
    )
    adapters = {
        str(i): SimpleNamespace(is_prompt_learning=prompt)
        for i, prompt in enumerate(changes.get("prompts", ()))
    }
    args = SimpleNamespace(
        torch_compile=changes.get("compile", False),
        gradient_checkpointing=changes.get("checkpointing", True),
        gradient_checkpointing_kwargs={"use_reentrant": True} if reentrant else None,
    )
    model = SimpleNamespace(peft_config=adapters or None)
    options = unsupported_options(SimpleNamespace(args=args, accelerator=accelerator, model=model))
    assert [name for name, (is_set, _) in options.items() if is_set] == ([option] if option else [])
    if option:
        with pytest.raises(ValueError, match=f"GACTrainer does not support {option}: "):
            refuse("GACTrainer", options)


def test_a_text_completion_ends_with_one_eos_and_the_prompt_has_the_special_tokens() -> None:
    words = make_tokenizer()
    eos = words.eos_token_id
    plain = encode({"prompt": "1+2=", "completion": "3"}, "row 1", words)
    assert plain["start"] == len(words("1+2=")["input_ids"])
    assert plain["ids"][plain["start"] :] == [*words.encode("3", add_special_tokens=False), eos]
    assert encode({"prompt": "1+2=", "completion": f"3{words.eos_token}"}, "", words) == plain
    unk, digits = words.unk_token_id, words("1+2=3", add_special_tokens=False)["input_ids"]
    words._tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", unk)]
    )
    special = encode({"prompt": "1+2=", "completion": "3"}, "row 1", words)
    assert special == {"ids": [unk, *digits, eos], "start": 5}
    words._tokenizer.normalizer = Strip()
    with pytest.raises(ValueError, match="row 1: the completion ' ' has no tokens; remove the row"):
        encode({"prompt": "1+2=", "completion": " "}, "row 1", words)


CHAT = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>-{% endif %}{% endfor %}"
)
LAST_ONLY = "{{ messages[-1].content }}"  # so the prompt is formatted differently


def test_a_conversation_ends_at_the_last_eos() -> None:
    words = make_tokenizer()
    words.chat_template = CHAT
    turns = [
        {"role": role, "content": text}
        for role, text in (
            ("user", "1+2="),
            ("assistant", "3"),
            ("user", "+1="),
            ("assistant", "4<eos>5"),
        )
    ]
    whole = encode({"messages": turns}, "row", words)
    assert words.decode(whole["ids"]) == "1+2=3<eos>-+1=4<eos>5<eos>"
    assert words.decode(whole["ids"][whole["start"] :]) == "4<eos>5<eos>"
    for cut in (1, 2, 3):
        assert encode({"prompt": turns[:cut], "completion": turns[cut:]}, "row", words) == whole
    both = {"prompt": turns[:1], "completion": turns[1:2], "messages": turns}
    assert words.decode(encode(both, "row", words)["ids"]) == "1+2=3<eos>"


ASKED = {"role": "user", "content": "1+2="}


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHAT, {"messages": [ASKED]}, "row 7: the last message .* but its role is 'user'"),
        (CHAT, {"messages": [ASKED, {"role": "assistant", "content": ""}]}, "no content; remove"),
        (CHAT, {"messages": []}, "the completion .* is empty; remove the row"),
        (CHAT, {"prompt": "1", "completion": ""}, "the completion '' is empty"),
        (CHAT, {"prompt": "", "completion": "1"}, "the prompt '' has no tokens; use a non-empty"),
        (CHAT, {"prompt": "1", "completion": [ASKED]}, "prompt is a str, but completion is a list"),
        (CHAT, {"prompt": [ASKED], "completion": "1"}, "prompt is a list, but completion is a str"),
        (LAST_ONLY, {"messages": [ASKED, {"role": "assistant", "content": "3"}]}, "differently"),
    ],
)
def test_demonstrations_without_a_target_are_named(template: str, row: Any, message: str) -> None:
    words = make_tokenizer()
    words.chat_template = template
    with pytest.raises(ValueError, match=f"row 7: .*{message.removeprefix('row 7: ')}"):
        encode(row, "row 7", words)
