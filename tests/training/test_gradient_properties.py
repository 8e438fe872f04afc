"""What the gradient of a step does not depend on, and what it is linear in, for random rows."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from gac.collectives import MAXIMUM
from gac.data.micro_batches import MicroBatches
from gac.methods.base import Loss
from gac.methods.teacher import TeacherConfig
from gac.rows import Row, count
from gac.training.gradients import Forward, Gradients, SampledKL, mismatch
from gac.training.probes import GradientParts
from gac.training.step import Measured, Rewards, Step
from gac.training.teacher import Teacher
from gac.types import Mix, StepNeeds
from gac_kernels import DemoWeight, LossSpec
from tests.training.test_packing import assert_close, make, run_step

MODEL = make("qwen2", num_hidden_layers=1)
ADVANTAGES = st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0])


@st.composite
def batches(draw: st.DrawFn, mixed: bool = True) -> list[Row]:
    """Two to five rows of each kind, with gradients of both kinds; some rollouts have a prefix."""
    rows = []
    for demo in draw(st.permutations([False, False, True, True, *draw(st.lists(st.booleans()))])):
        if len(rows) == 10:
            break
        ids = tuple(draw(st.lists(st.integers(3, 60), min_size=2, max_size=12)))
        start = draw(st.integers(0, len(ids) - 2))
        switch = draw(st.integers(start, len(ids) - 1)) if mixed and not demo else -1
        rows.append(Row(ids, start, demo, draw(ADVANTAGES), len(rows), switch=switch))
    last = max(i for i, row in enumerate(rows) if not row.is_demo)
    rows[last] = rows[last]._replace(advantage=1.25)
    return rows


MICRO = st.one_of(
    st.integers(1, 6).map(lambda n: MicroBatches(rows=n)),
    st.builds(MicroBatches, tokens=st.integers(12, 60), packed=st.booleans()),
)
LOSSES = st.builds(
    LossSpec,
    kl_coef=st.sampled_from([0.0, 0.1]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    rollout_reduction=st.sampled_from(["sequence", "token"]),
    demo_reduction=st.sampled_from(["sequence", "token"]),
    demo_weight=st.sampled_from(DemoWeight),
).map(Loss)


@settings(max_examples=20)
@given(batches(), MICRO, LOSSES, st.randoms())
def test_order_micro_batches_and_packing_change_nothing(rows, micro, loss, rng) -> None:
    expected = run_step(MODEL, rows, MicroBatches(rows=len(rows)), loss)
    rng.shuffle(rows)
    assert_close(expected, run_step(MODEL, rows, micro, loss))


def gradient(rows: list[Row], mix: Mix, loss: Loss, counted: list[Row], old=(), **needs):
    """Measurements of a step on `rows`, as a part of the rows `counted`, and its gradient."""
    forward = Forward(Accelerator(cpu=True), MODEL, MODEL, 0.7, MicroBatches(rows=3), pad_token=0)
    step = Step(
        0,
        tuple(rows),
        mix,
        count(counted),
        Rewards.of([row.advantage for row in rows]),
        StepNeeds(**needs),
        old,
        seed=1,
    )
    MODEL.zero_grad()
    return Gradients(forward, loss, averages="average" in needs)(step), flat_gradient()


def flat_gradient() -> torch.Tensor:
    parts = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in MODEL.parameters()]
    return torch.nn.utils.parameters_to_vector(parts).double()


@settings(max_examples=10)
@given(batches(mixed=False), st.floats(0.25, 4), st.floats(0.1, 0.9))
def test_the_gradient_is_linear_in_the_advantages_and_the_weights(rows, factor, mu) -> None:
    loss = Loss(LossSpec())

    def scaled(by: float, mix: Mix) -> torch.Tensor:
        return gradient(
            [row._replace(advantage=by * row.advantage) for row in rows], mix, loss, rows
        )[1]

    demo, rollout = scaled(1.0, Mix(1.0)), scaled(1.0, Mix(0.0))
    assert rollout.any()
    assert demo.any()
    expected = mu * demo + (1 - mu) * factor * rollout
    close(scaled(factor, Mix(mu)), expected)
    close(scaled(factor, Mix(mu, 3.0)), 3 * expected)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


SHAPED = {"demo_weight": DemoWeight.SHAPED}


@pytest.mark.parametrize(
    ("options", "demo", "advantage", "has_gradient"),
    [
        ({}, False, 1.0, True),
        ({}, False, 0.0, False),
        ({"entropy_coef": 1.0}, False, 0.0, True),
        ({"kl_coef": 1.0, "kl_estimator": "k1"}, False, 0.0, True),
        ({}, True, 0.0, True),
        (SHAPED, True, 0.0, False),
        (SHAPED, True, 1.0, True),
    ],
)
def test_rows_with_a_gradient(options, demo: bool, advantage: float, has_gradient: bool) -> None:
    """A gradient of zeros would still move AdamW."""
    rows = [Row((5, 6, 7), 1, demo, advantage, 0)]
    gradient(rows, Mix(float(demo)), Loss(LossSpec(**options)), rows, kl=True)
    grads = [p.grad for p in MODEL.parameters() if p.grad is not None]
    assert bool(grads) == any(map(torch.any, grads)) == has_gradient


def test_a_teacher_scores_a_row_after_its_context() -> None:
    forward = Forward(Accelerator(cpu=True), MODEL, MODEL, 0.7, MicroBatches(), pad_token=0)
    row = Row((5, 6, 7, 8), 1, False, 1.0, 0, switch=2, context=(9, 4))
    teacher = Teacher(TeacherConfig(self=True, loss="k2"), forward, None, sees_demos=True)
    known, unknown = teacher.score([row, row._replace(sequence=1, context=())]).logps
    (expected,) = forward.row_logprobs([Row((9, 4, 5, 6, 7, 8), 3, False, 1.0, 0)])
    close(known, expected)
    assert len(unknown) == 3
    assert unknown.isnan().all()


@pytest.mark.parametrize(
    ("correction", "minimum", "corrected"),
    [("token_mask", 0.5, 2), ("token_mask", None, 1), ("sequence_mask", 0.5, 0)],
)
def test_mismatch_by_hand(correction: str, minimum: float | None, corrected: int) -> None:
    """Ratios of 1, e and 1 / e, whose product is 1."""
    assert mismatch(
        torch.tensor([-1.0, -1.0, -2.0]).double(),
        torch.tensor([-1.0, -2.0, -1.0]).double(),
        advantage=1.0,
        spec=LossSpec(correction=correction, correction_min=minimum, correction_max=2.0),
    ) == {
        "sampling/mismatch_kl": (pytest.approx(math.e + 1 / math.e - 2), 3),
        "sampling/sampling_logp_difference/max": (1.0, MAXIMUM),
        "sampling/frac_corrected": (corrected, 3),
    }


@pytest.mark.parametrize(
    ("correction", "advantage", "corrected"),
    [("mask", 1.0, 2), ("mask_away", 1.0, 1), ("mask_away", -1.0, 1), ("mask_away", 0.0, 0)],
)
def test_masks_by_probabilities_by_hand(correction: str, advantage: float, corrected: int) -> None:
    """Differences of 0.1, 0.4 and -0.4."""
    columns = mismatch(
        torch.tensor([0.5, 0.5, 0.1]).double().log(),
        torch.tensor([0.4, 0.1, 0.5]).double().log(),
        advantage=advantage,
        spec=LossSpec(correction=f"probability_{correction}"),
    )
    assert columns["sampling/frac_corrected"] == (corrected, 3)


def test_moving_averages_by_hand() -> None:
    """Without a gradient, the average decays."""
    parts = GradientParts(
        [(name, torch.nn.Parameter(torch.zeros(()))) for name in "wv"], StepNeeds(average=0.25)
    )
    parts.parts = [[torch.tensor(8.0), None]]
    parts.average({"0.w": torch.tensor(4.0), "0.v": torch.tensor(4.0)})
    assert parts.parts == [[5, 3]]
    parts.combine([2.0])
    assert parts.averages == {"0.w": 5, "0.v": 3}  # for the next step


@settings(max_examples=10)
@given(
    batches(mixed=False),
    st.integers(1, 3),
    st.just((0.25, 0.75)) | st.tuples(st.floats(0.1, 4), st.floats(0.1, 4)),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_gradients_of_the_parts_of_each_term(rows, number, pair, mu) -> None:
    """Their inner products, weighted sums and moving averages; the bias of phi and of clipping."""
    loss = Loss(LossSpec(demo_weight=DemoWeight.PHI, dual_clip=1.1))
    forward = Forward(Accelerator(cpu=True), MODEL, MODEL, 0.7, MicroBatches(), pad_token=0)
    old = tuple(logps - 0.3 for logps in forward.row_logprobs(rows))  # ratios of 1.35 are clipped
    parts, plain = [], []
    for demo in (True, False):
        term = [row for row in rows if row.is_demo == demo]
        for i in range(number):
            part = term[len(term) * i // number : len(term) * (i + 1) // number]
            parts.append(gradient(part, Mix(float(demo), number), loss, rows, old)[1])
        spec = replace(
            loss.spec, demo_weight=DemoWeight.ONE, clip_low=None, clip_high=None, dual_clip=None
        )
        plain.append(gradient(term, Mix(float(demo)), Loss(spec), rows, old)[1])
    means = [sum(own) / number for own in (parts[:number], parts[number:])]

    def measure(**needs) -> Measured:
        return gradient(rows, Mix(mu), loss, rows, old, parts=number, **needs)[0]

    measured = measure(bias=True, signals=True)
    close(measured.gram, inner_products(parts))
    close(measured.evidence.bias_gram, inner_products([*means, *plain]))
    losses = pytest.approx(gradient(rows, Mix(mu), loss, rows, old)[0].losses)
    # `combine_pair` replaces the gradient of the line above
    combined = measured.parts.combine_pair(pair, Mix(mu))
    assert combined == Mix.weights(*pair)
    assert measured.losses == losses
    assert measured.evidence.step == 0
    close(flat_gradient(), pair[0] * means[0] + pair[1] * means[1])
    if number == 1:  # the moving averages start at 0
        close(measure(average=0.25).gram, inner_products(parts) / 16)
    assert measure().parts.combine_pair((0.0, 0.0), Mix(mu)) == Mix(mu, 0.0)
    # a gradient of zeros would still move AdamW, whose moments are not 0
    assert all(p.grad is None for p in MODEL.parameters())


def inner_products(vectors: list[torch.Tensor]) -> torch.Tensor:
    table = torch.stack(vectors)
    return table @ table.T


@pytest.mark.parametrize("chosen", [3, 99])
def test_the_sampled_kl_takes_other_rollouts_in_each_step(chosen: int) -> None:
    rows = tuple(Row((5, 6, 7 + i), 1, i % 3 == 2, 1.0, i, switch=2 * (i == 0)) for i in range(12))
    rollouts = {row.sequence for row in rows[1:] if not row.is_demo}  # the first is mixed
    forward = Forward(Accelerator(cpu=True), MODEL, MODEL, 0.7, MicroBatches(), pad_token=0)
    step = Step(0, rows, Mix(0.5), count(rows), Rewards(0, 0, 0), StepNeeds(kl=True), (), seed=1)
    samples = [
        set(SampledKL(forward, own, chosen).reference)
        for own in [replace(step, number=number) for number in range(len(rollouts))]
    ]
    assert {len(sample) for sample in samples} == {min(chosen, len(rollouts))}
    assert set.union(*samples) == rollouts
    assert all((a != b) == (chosen == 3) for a, b in itertools.pairwise(samples))
