"""How a step's rows become forward passes, gradients and probes, against values by hand."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gac.control.evidence import Evidence
from gac.control.term_pair import TermPair
from gac.data.micro import MicroBatches
from gac.data.rows import Counts, Row, collate
from gac.methods.base import Loss, Mix, StepNeeds
from gac.parallel import collectives
from gac.training import forward, gradients
from gac.training.forward import Forward
from gac.training.gradients import Gradients
from gac.training.step import Rewards, Step
from gac_kernels import DemoWeight, HeadSketch, LossSpec

ACCELERATOR = SimpleNamespace(device="cpu", num_processes=2, unwrap_model=lambda model: model)


def row(length: int = 3, demo: bool = False, **fields: Any) -> Row:
    return Row((5,) * length, 1, demo, **{"advantage": 1.0, **fields})


# ---- schedules and log-probs


def make_forward(micro: MicroBatches, model: Any = None, **fields: Any) -> Forward:
    accelerator = SimpleNamespace(**{**vars(ACCELERATOR), **fields})
    return Forward(accelerator, model, "reference", 0.5, micro, pad_token=9)


def test_all_ranks_have_the_same_sequence_of_micro_batches(monkeypatch) -> None:
    """Another rank has three micro-batches of rollouts and two of demonstrations."""
    demos = [row(demo=True, weight=w, sequence=i) for i, w in enumerate((2.0, 1.0, 2.0))]
    own: list = []

    def largest(values):
        own.append(values)
        return [float(max(a, b)) for a, b in zip(values, (3, 2), strict=True)]

    monkeypatch.setattr(collectives, "largest", largest)
    micro = MicroBatches(tokens=12, packed=True)
    rollouts = [row(n) for n in (4, 3, 5)]
    schedule = make_forward(micro).schedule([demos[0], *rollouts, *demos[1:]])
    # rollouts are split into as many parts; demonstrations of two weights stay two parts
    expected = [(False, [r]) for r in (rollouts[2], rollouts[0], rollouts[1])]
    assert schedule == [*expected, (True, [demos[1]]), (True, [demos[0], demos[2]])]
    schedule = make_forward(micro).schedule(rollouts[:1] + demos)
    assert [len(part) for _, part in schedule] == [1, 0, 0, 1, 2]
    # two weights are not split further, and a rank without rows has only empty micro-batches
    two = [row(weight=2.0), row(weight=1.0)]
    assert make_forward(micro).schedule(two)[:3] == [
        (False, [two[1]]),
        (False, two[:1]),
        (False, []),
    ]
    assert make_forward(micro).schedule([]) == [(False, [])] * 3 + [(True, [])] * 2
    assert own == [[1, 2], [1, 2], [2, 0], [0, 0]]


class Numbered(nn.Module):
    """The log-prob of a target is minus the target's id, and minus 100 more under `offset`."""

    offset = 0.0

    def forward(self, request: Any, **inputs: Any) -> Any:
        def logprobs(targets: Tensor, temperature: float) -> tuple[Tensor, None]:
            assert temperature == 0.5
            values = torch.where(targets < 0, 0.0, -targets.float() - self.offset)
            return values * torch.ones((), requires_grad=True), None

        return request(SimpleNamespace(logprobs=logprobs))


@pytest.mark.parametrize("micro", [MicroBatches(rows=1), MicroBatches(tokens=12, packed=True)])
def test_log_probs_of_rows_and_of_the_teacher(monkeypatch, micro) -> None:
    resharded: list = []
    monkeypatch.setattr(forward, "reshard", resharded.append)
    policy, other = Numbered(), Numbered()
    other.offset = 100.0
    rows = [
        Row((1, 2, 3, 4), 2, False, sequence=2),
        Row((6, 7), 0, True, sequence=0),  # no position predicts a first token
        Row((1, 3, 8), 1, False, sequence=1, context=(7, 7), switch=2),
    ]
    passes = make_forward(micro, policy)
    values = passes.row_logprobs(rows)
    assert [x.tolist() for x in values] == [[-3, -4], [-7], [-3, -8]]
    assert not any(x.requires_grad for x in values)
    assert [x.tolist() for x in passes.row_logprobs(rows, other)] == [
        [-103, -104],
        [-107],
        [-103, -108],
    ]
    assert resharded == [policy, other]
    monkeypatch.setattr(collectives, "largest", lambda counts: [1.0, 1.0])
    assert passes.row_logprobs([]) == []  # another rank has rows
    passed = []
    monkeypatch.setattr(Forward, "row_logprobs", lambda self, seen: passed.extend(seen) or values)
    first, second, third = passes.teacher_logprobs(rows)
    assert passed == [
        rows[0]._replace(switch=-1),
        rows[1]._replace(switch=-1),
        Row((7, 7, 1, 3, 8), 3, False, sequence=1, context=(7, 7), switch=-1),
    ]
    assert third is values[2] and first.shape == (2,) and second.shape == (1,)
    assert first.isnan().all() and second.isnan().all()


def test_the_reference_is_a_model_or_the_policy_without_adapters() -> None:
    reference, events = Numbered(), []
    reference.offset = 1.0

    @contextlib.contextmanager
    def disable_adapter():
        events.append("disabled")
        yield
        events.append("enabled")

    policy = Numbered()
    passes = make_forward(
        MicroBatches(),
        policy,
        unwrap_model=lambda m: SimpleNamespace(disable_adapter=disable_adapter),
    )
    batch = collate([Row((1, 2, 3), 1, False)], 0)
    with passes.reference_model() as model:
        assert model == "reference"
    passes = Forward(passes.accelerator, policy, None, 0.5, passes.micro, 0)
    assert passes.reference_logprobs(batch, False).tolist() == [[-2, -3, 0]]
    assert not passes.reference_logprobs(batch, False).requires_grad
    with passes.reference_model() as model:
        assert model is policy
        events.append("used")
    assert events == ["disabled", "enabled"] * 2 + ["disabled", "used", "enabled"]
    assert passes.reference_logprobs(batch, True).tolist() == [[0, 0, 0]]
    elsewhere = batch._replace(targets=batch.targets.to("meta"))
    assert passes.reference_logprobs(elsewhere, True).is_meta
    passes = Forward(passes.accelerator, policy, reference, 0.5, passes.micro, 0)
    assert passes.reference_logprobs(batch, False).tolist() == [[-3, -4, 0]]


# ---- the gradient


def make_gradients(loss: Loss, **fields: Any) -> Any:
    return SimpleNamespace(loss=loss, kl_sample_size=None, accelerator=ACCELERATOR, **fields)


KINDS = {
    "demo": row(demo=True),
    "flat demo": row(demo=True, advantage=0.0),
    "mixed": row(switch=2),
    "flat mixed": row(switch=2, advantage=0.0),
    "rollout": row(advantage=-0.5),
    "flat": row(advantage=0.0),
}


@pytest.mark.parametrize(
    ("spec", "mu", "live"),
    [
        ({}, 0.5, "demo, flat demo, mixed, flat mixed, rollout"),
        ({}, 0.0, "mixed, rollout"),
        ({}, 1.0, "demo, flat demo, mixed, flat mixed"),
        ({"demo_weight": "shaped"}, 0.5, "demo, mixed, rollout"),
        ({"kl_coef": 0.1}, 0.5, ", ".join(KINDS)),
        ({"entropy_coef": -0.1}, 0.5, ", ".join(KINDS)),
        ({"kl_coef": 0.1}, 1.0, "demo, flat demo, mixed, flat mixed"),
    ],
)
def test_rows_that_may_have_a_gradient(spec, mu, live) -> None:
    fused = make_gradients(Loss(LossSpec(**spec)))
    assert ", ".join(n for n, r in KINDS.items() if Gradients._has_gradient(fused, r, mu)) == live
    custom = make_gradients(Loss(LossSpec(**spec), token=lambda view: view.logps))
    assert all(Gradients._has_gradient(custom, r, mu) for r in KINDS.values())


STEP = Step(
    3,
    (),
    Mix(0.3, 4.0),
    Counts(rollouts=8, rollout_tokens=20, demos=6, demo_tokens=30, rows=14, tokens=99),
    Rewards(0, 0, 0),
    StepNeeds(sketch=8),
    (torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])),
    seed=1,
    sketch_seed=17,
)


class FakeHead:
    """A head that returns the arguments of its loss."""

    def packed(self) -> Any:
        return SimpleNamespace(loss=lambda *a, **k: ("packed", a, k))

    def loss(self, *arguments: Any, **keywords: Any) -> Any:
        return "padded", arguments, keywords


ROLLOUTS = [
    Row((1, 2, 3), 1, False, 0.5, 0, 2.0, engine_logps=(-0.5, -0.25)),
    Row((4, 5), 1, False, -1.5, 1, 2.0, engine_logps=(-0.75,)),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("demo", [False, True])
def test_the_arguments_of_the_fused_loss(packed: bool, demo: bool) -> None:
    """Divisors: global counts by two ranks and the rows' weight 2."""
    rows = [r._replace(is_demo=demo) for r in ROLLOUTS]
    batch = collate(rows, 0, packed=packed)
    spec = LossSpec(correction="token_truncate", clip_low=0.1)
    reference = 0.0 * batch.targets - 7
    asked: list = []
    passes = SimpleNamespace(
        temperature=0.7, reference_logprobs=lambda *a: asked.append(a) or reference
    )
    own = make_gradients(Loss(LossSpec()), forward=passes)
    layout = lambda x: x.flatten() if packed else x  # noqa: E731 - a fake
    for kl_sample_size, kl in ((None, True), (2, True), (None, False)):
        own.kl_sample_size = kl_sample_size
        step = replace(STEP, needs=StepNeeds(sketch=8, kl=kl))
        request = Gradients._request(own, step, batch, rows, demo, 0.3, spec)
        kind, (targets, advantages, is_demo), keywords = request(FakeHead())
        assert kind == ("packed" if packed else "padded")
        assert torch.equal(targets, layout(batch.targets))
        assert advantages is batch.advantages and is_demo is batch.is_demo
        temperature = 1.0 if demo else 0.7
        expected = LossSpec(correction="token_truncate", clip_low=0.1, temperature=temperature)
        assert keywords.pop("spec") == expected
        assert keywords.pop("cu_seqlens") is batch.cu_seqlens
        assert keywords.pop("sketch") == HeadSketch(8, 17)
        ref = keywords.pop("ref_logps")
        measured = kl and kl_sample_size is None
        assert (ref is not None) == measured and (
            ref is None or torch.equal(ref, layout(reference))
        )
        old, engine = keywords.pop("old_logps"), keywords.pop("rollout_logps")
        scored = (layout(batch.targets) >= 0).nonzero(as_tuple=True)
        assert old is None if demo else old[scored].tolist() == [-1, -2, -3]
        assert engine[scored].tolist() == [-0.5, -0.25, -0.75] and engine.isnan().any()
        assert keywords == {"mu": 0.3, "rollout_norm": 8 / 4, "demo_norm": 30 / 4}
    assert [(a is batch, b) for a, b in asked] == [(True, demo)]


def test_what_a_loss_does_not_get() -> None:
    """No sampling log-probs on-policy, none of an engine, no sketch of rows with two parts."""
    own = make_gradients(Loss(LossSpec(), pooled=True), forward=SimpleNamespace(temperature=0.7))
    mixed = [ROLLOUTS[0]._replace(switch=2, weight=4.0)]
    step = replace(STEP, old_logps=())
    request = Gradients._request(own, step, collate(mixed, 0), mixed, False, 0.3, LossSpec())
    _, _, keywords = request(FakeHead())
    assert keywords["old_logps"] is keywords["rollout_logps"] is keywords["ref_logps"] is None
    assert "sketch" not in keywords
    assert (keywords["demo_norm"], keywords["rollout_norm"]) == (50 / 8, 14 / 8)
    plain = replace(STEP, needs=StepNeeds())
    for rows, step in ((ROLLOUTS, plain), ([], STEP)):
        request = Gradients._request(own, step, collate(rows, 0), rows, False, 0.3, LossSpec())
        _, _, keywords = request(FakeHead())
        assert ("sketch" in keywords) == (not rows)
        assert (keywords["old_logps"] is None) == (not rows)
        assert keywords["rollout_norm"] == (14 / 4 if rows else 14 / 2)


@pytest.mark.parametrize("referenced", [False, True])
def test_the_arguments_of_a_custom_loss(monkeypatch, referenced: bool) -> None:
    received: list = []
    monkeypatch.setattr(gradients, "custom_loss", lambda *arguments: received.append(arguments))
    passes = make_forward(MicroBatches())
    model = lambda request, **inputs: request(SimpleNamespace(detached=torch.is_grad_enabled))  # noqa: E731 - a fake
    passes = Forward(passes.accelerator, None, model, 0.7, passes.micro, 0)
    token = lambda view: view.logps  # noqa: E731 - a fake
    own = make_gradients(Loss(LossSpec(), token=token, reference=referenced), forward=passes)
    batch, teacher = collate(ROLLOUTS, 0), (torch.tensor([-0.1, -0.2]), torch.tensor([-0.3]))
    step = replace(STEP, teacher_logps=teacher)
    for demo, rows in ((False, ROLLOUTS), (True, ROLLOUTS), (False, [])):
        Gradients._request(own, step, batch, rows, demo, 0.3, LossSpec())("head")
        loss, head, reference, used, mu, old, ref, spec, norms, seen, _ = received[-1]
        assert (loss, head, used, mu, ref) == (token, "head", batch, 0.3, None)
        assert reference is (False if referenced else None)  # without gradients
        assert spec == LossSpec(temperature=1.0 if demo else 0.7)
        assert norms == (TermPair(30 / 4, 8 / 4) if rows else TermPair(30 / 2, 8 / 2))
        if demo or not rows:
            assert old is seen is None
        else:
            assert old.tolist() == [[-1, -2, 0], [-3, 0, 0]]
            assert seen[0, :2].tolist() + seen[1, :1].tolist() == pytest.approx([-0.1, -0.2, -0.3])
            assert seen.isnan().sum() == 3


class Model(nn.Module):
    """Its loss is its weight times `request()`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, request: Any, **inputs: Any) -> Any:
        return SimpleNamespace(loss=self.weight * request, graph=torch.is_grad_enabled())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("sketch", [0, 8])
def test_one_pass_over_the_rows(monkeypatch, grad: bool, plain: bool, sketch: int) -> None:
    """Gradients are accumulated without communication until the last of three micro-batches."""
    model, events, requests, probed = Model(), [], [], []
    monkeypatch.setattr(gradients, "reshard", lambda m: events.append(("reshard", m is model)))

    @contextlib.contextmanager
    def no_sync(m: nn.Module):
        assert m is model
        events.append("no sync")
        yield
        assert model.weight.grad is not None  # the backward runs inside

    accelerator = SimpleNamespace(no_sync=no_sync, backward=lambda loss: loss.backward())
    rows = [row(), row(demo=True), row(demo=True)]
    passes = SimpleNamespace(
        schedule=lambda all_rows: [(r.is_demo, [r]) for r in all_rows],
        collate=lambda micro: SimpleNamespace(model_inputs={}, rows=micro),
    )

    def request(step: Step, batch: Any, micro: list, demo: bool, mu: float, spec: LossSpec):
        assert step is own_step and batch.rows == micro
        requests.append((micro[0].is_demo, demo, mu, spec))
        return float(len(requests))

    spec = LossSpec(clip_low=0.1, clip_high=0.3, dual_clip=2.0, entropy_coef=0.4)
    own = make_gradients(Loss(spec), model=model, forward=passes, _request=request)
    own.accelerator = accelerator
    own_step = replace(STEP, needs=StepNeeds(sketch=sketch))
    probe = SimpleNamespace(add=lambda *a: probed.append(a))
    Gradients._accumulate(own, own_step, [probe, probe], rows, Mix(0.3, 4.0), plain, grad=grad)
    if plain:
        spec = LossSpec(
            clip_low=None,
            clip_high=None,
            dual_clip=None,
            entropy_coef=0.4,
            demo_weight=DemoWeight.ONE,
        )
    mus = [0.0, 1.0, 1.0] if sketch and not grad else [0.3] * 3
    assert requests == [(r.is_demo, r.is_demo, m, spec) for r, m in zip(rows, mus, strict=True)]
    assert events == (["no sync"] * 2 if grad else [("reshard", True)])
    assert (model.weight.grad is not None) == grad
    assert not grad or model.weight.grad == 4 * (1 + 2 + 3)
    assert len(probed) == (0 if plain else 6)
    for batch, micro, out in probed:
        assert batch.rows is micro and out.graph == grad


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("kl_sample_size", [None, 3])
@pytest.mark.parametrize("measures", [True, False])
def test_the_order_of_a_step(
    monkeypatch, parts: int, kl_sample_size: int | None, measures: bool
) -> None:
    """Rows without a gradient first; then those with one, at once or in parts."""
    events: list = []
    rows = (row(1), row(2, True), row(3), row(4, True))
    needs = StepNeeds(kl=measures, signals=measures, parts=parts, sources=measures)
    needs = needs._replace(sketch=8 if measures and parts else 0)
    step = replace(STEP, rows=rows, needs=needs)
    totals = SimpleNamespace(
        losses=lambda: "losses", moments=lambda device: f"moments {device}", sources=lambda: "names"
    )
    sketches = SimpleNamespace(gathered=lambda: "sketches")
    sampled = SimpleNamespace(mean=lambda: 0.25)

    class Parts:
        def __init__(self, trainable: str, own: StepNeeds) -> None:
            assert (trainable, own) == ("trainable", needs)

        def measure(self, *arguments: Any) -> tuple[str, str]:
            all_rows, live, accumulate, tracked = arguments
            assert (all_rows, live, tracked) == (rows, [rows[1], rows[2]], "tracked")
            accumulate(live[:1], Mix(1.0, 2.0), True)
            return "gram", "bias"

    def accumulate(own: Step, probes: list, batch: list, mix: Mix, plain=False, *, grad=True):
        assert own is step
        events.append((probes, batch, mix, plain, grad))

    monkeypatch.setattr(gradients, "seed", events.append)
    monkeypatch.setattr(gradients, "Totals", lambda: totals)
    monkeypatch.setattr(gradients, "UnitSketches", {needs.sketch: sketches}.get)
    monkeypatch.setattr(gradients, "SampledKL", lambda *a: events.append(a) or sampled)
    monkeypatch.setattr(gradients, "GradientParts", Parts)
    own = SimpleNamespace(
        forward="forward",
        accelerator=ACCELERATOR,
        kl_sample_size=kl_sample_size,
        tracked="tracked",
        _trainable=lambda: "trainable",
        _has_gradient=lambda r, mu: r in rows[1:3] and mu == (0.5 if parts else 0.3),
        _accumulate=accumulate,
    )
    measured = Gradients.__call__(own, step)
    uses_kl = measures and kl_sample_size is not None
    probes = [totals, sketches, *[sampled] * uses_kl]
    live = [rows[1], rows[2]]
    last = (probes, live[:1], Mix(1.0, 2.0), True, True)
    last = last if parts else (probes, live, step.mix, False, True)
    first = (probes, [rows[0], rows[3]], step.mix, False, False)
    assert events == [1, *[("forward", step, 3)] * uses_kl, first, last]
    assert (measured.losses, measured.moments) == ("losses", "moments cpu")
    assert measured.kl == (0.25 if uses_kl else None)
    assert isinstance(measured.parts, Parts) == bool(parts)
    assert measured.gram == ("gram" if parts else None)
    assert measured.sources == ("names" if measures else None)
    if measures:
        gram, bias, own_sketches = ("gram", "bias", "sketches") if parts else (None, None, None)
        expected = Evidence(3, "moments cpu", gram, parts, bias, own_sketches)
        assert measured.evidence == expected
    else:
        assert measured.evidence is None


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_losses_after_an_update(monkeypatch, coefficient: float) -> None:
    """A KL only if it is in the loss, and no sketches."""
    calls: list = []
    rows, needs = (row(),), StepNeeds(kl=True, sketch=8, trim=0.2)
    own = make_gradients(
        Loss(LossSpec(kl_coef=coefficient)), _accumulate=lambda *a, grad: calls.append((*a, grad))
    )
    monkeypatch.setattr(gradients, "Totals", lambda: SimpleNamespace(losses=lambda: "losses"))
    assert Gradients.losses(own, replace(STEP, rows=rows, needs=needs)) == "losses"
    ((step, (totals,), used, mix, grad),) = calls
    needs = StepNeeds(kl=coefficient != 0, trim=0.2)
    assert step == replace(STEP, rows=rows, needs=needs) and totals.losses() == "losses"
    assert (used, mix, grad) == (rows, STEP.mix, False)
