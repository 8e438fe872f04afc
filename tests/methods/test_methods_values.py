"""Each method against its published formula: the gradient of a real step, and its weights.

The expected values come from plain autograd in float64 over the same rows, one row at a time, so
that masks, normalizers, temperatures and prefixes are checked too.
"""

import copy
import math

import pytest
import torch
from torch import Tensor

from gac.control.signals import GradientSignals
from gac.methods import METHODS, Mix, Observation
from gac.methods.solvers import cross_gram
from gac.models.head import Head
from gac.rows import Batch, Row
from gac.training.probes import GradientParts
from gac.training.token_loss import OtherLogps, custom_loss
from gac.training.trainer import Trainer
from gac.types import StepNeeds, TermPair
from gac_kernels import LossSpec, Signals
from tests.methods.published import (
    EXTRA,
    LOSSES,
    MAX_NEW_TOKENS,
    SOLVERS,
    TEMPERATURE,
    RowTerms,
    constant_sum,
    nll,
    phi,
    policy_gradient,
    row_terms,
    surrogate,
    teacher_of,
    uft,
)
from tests.tiny import take_steps, tiny_config

BIASED = {
    "estimator": "biased",
    "signals": {"name": "gradients", "bias": True},
    "gradient_parts": 2,
}

SEED = 0  # with its samples, some prompts are solved and some are not


def test_every_method_has_golden_values():
    assert sorted([*LOSSES, *SOLVERS]) == sorted(METHODS)


def float64_copy(model) -> object:
    """A copy of a model whose forward is transformers' own."""
    copied = copy.deepcopy(model).double()
    # the patched forwards still call the original model
    del copied.forward, copied.get_output_embeddings().forward
    return copied


def one_step(
    name: str, task, out, fields=None, first: int = 0, reuse: bool = True, **changes
) -> tuple[Trainer, list[Row], list[Tensor], object]:
    """Run one real step, after `first` others, with their rollouts if `reuse`.

    Returns the trainer, the step's rows, the gradient passed to the optimizer, and a float64 copy
    of the model from before the step.
    """
    rollouts = {
        "num_prompts": 6,
        "num_generations": 4,
        "max_completion_length": MAX_NEW_TOKENS,
        "temperature": TEMPERATURE,
        "num_iterations": first + 1 if reuse else 1,
    }
    changes |= teacher_of(name, task, out)
    fields = EXTRA.get(name, {}) if fields is None else fields
    config = tiny_config(
        task,
        out,
        method={"name": name, **fields},
        rollouts=rollouts,
        eval={},
        micro_batch_size=5,
        **{"seed": SEED} | changes,
    )
    trainer = Trainer(config)
    trainer.initial, trainer.updated = float64_copy(trainer.model), []
    for _ in range(first):
        take_steps(trainer, 1)
        trainer.updated.append(float64_copy(trainer.model))
    before = float64_copy(trainer.model)
    rows: list[Row] = []
    call = trainer.gradients.__class__.__call__
    grads: list[Tensor] = []
    step = trainer.optimizer.step

    def record_rows(self, step_data):
        rows.extend(step_data.rows)
        trainer.seen = step_data
        return call(self, step_data)

    def record_grads(*args, **keywords):
        grads.extend(p.grad.double() for p in trainer.model.parameters())
        return step(*args, **keywords)

    trainer.optimizer.step = record_grads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.gradients.__class__, "__call__", record_rows)
        trainer.row = trainer._train_step()
    return trainer, rows, grads, before


def one_step_terms(*arguments, **options) -> tuple[Trainer, list[RowTerms], list[Tensor], object]:
    """`one_step`, with the terms of each row in place of the rows."""
    trainer, rows, grads, model = one_step(*arguments, **options)
    other = trainer.teacher_model and float64_copy(trainer.teacher_model)
    # before the first step, the model equals the reference
    terms = [row_terms(model, model, row, teacher=other) for row in rows]
    return trainer, terms, grads, model


def gradient(loss: Tensor, model, retain_graph: bool = False) -> list[Tensor]:
    grads = torch.autograd.grad(
        loss, list(model.parameters()), retain_graph=retain_graph, allow_unused=True
    )
    return [
        torch.zeros_like(p) if g is None else g
        for g, p in zip(grads, model.parameters(), strict=True)
    ]


def assert_close(ours: list[Tensor], truth: list[Tensor]) -> None:
    """Compare float32 with float64, relative to the largest entry of the whole gradient."""
    size = max(t.abs().max() for t in truth)
    assert size > 0
    for x, y in zip(ours, truth, strict=True):
        assert (x - y).abs().max() < 2e-5 * size


def inner_product(x: list[Tensor], y: list[Tensor]) -> float:
    return sum((a * b).sum().item() for a, b in zip(x, y, strict=True))


def halves(rows: list[RowTerms]) -> tuple[list[RowTerms], list[RowTerms]]:
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


@pytest.mark.parametrize("name", LOSSES)
def test_step_gradient_matches_the_published_loss(name, two_layers, tmp_path):
    _, terms, grads, model = one_step_terms(name, two_layers, tmp_path)
    assert_close(grads, gradient(LOSSES[name](terms), model))


OFF_POLICY = ["constant", "grpo", "dr-grpo", "dapo", "gspo", "multitask", "luffy", "hpt", "superrl"]
OFF_POLICY += ["relift", "trapo", "uft", "prefix-rft"]


@pytest.mark.parametrize("name", OFF_POLICY)
def test_reused_rollouts_have_the_published_ratio_and_clip(name, two_layers, tmp_path):
    trainer, rows, grads, model = one_step(
        name,
        two_layers,
        tmp_path,
        first=1,
        optim={"lr": 0.03, "warmup_steps": 0, "max_grad_norm": 0},
    )
    old = trainer.seen.old_logps
    terms = [
        row_terms(model, model, row, name, None if row.is_demo else old[row.sequence])
        for row in rows
    ]
    ratios = torch.cat([(r.logp - r.old).exp()[~r.demo] for r in terms if not r.row.is_demo])
    assert ratios.min() < 0.7
    assert ratios.max() > 1.3
    assert (trainer.row["clip_fraction"] > 0) == bool(trainer.gradients.loss.spec.clip_low)
    assert_close(grads, gradient(LOSSES[name](terms), model))


def test_sdft_learns_from_a_moving_average_of_the_weights(two_layers, tmp_path):
    fast = {"lr": 0.03, "warmup_steps": 0, "max_grad_norm": 0}
    trainer, rows, grads, model = one_step(
        "sdft", two_layers, tmp_path, {"update_rate": 0.3}, first=2, reuse=False, optim=fast
    )
    first, second = trainer.initial, trainer.updated[0]
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        columns = zip(teacher.parameters(), *(m.parameters() for m in (first, second)), strict=True)
        for own, start, middle in columns:
            own.copy_(0.3 * own + 0.7 * (0.3 * middle + 0.7 * start))
    terms = [row_terms(model, model, row, teacher=teacher) for row in rows]
    assert_close(grads, gradient(LOSSES["sdft"](terms), model))


def test_sdpg_stays_close_to_the_initial_policy(two_layers, tmp_path):
    fast = {"lr": 0.03, "warmup_steps": 0, "max_grad_norm": 0}
    fields = {"coef": 0.001, "kl_coef": 0.001}
    trainer, rows, grads, model = one_step(
        "sdpg", two_layers, tmp_path, fields, first=1, reuse=False, optim=fast
    )
    terms = [row_terms(model, trainer.initial, row) for row in rows]
    assert max((r.logp - r.ref).abs().max() for r in terms) > 0.1
    assert_close(grads, gradient(LOSSES["sdpg"](terms), model))


def test_hinted_rows_keep_their_rollout_gradient(task, tmp_path):
    _, terms, grads, model = one_step_terms("uft", task, tmp_path, {"coef": 0.0})
    assert_close(grads, gradient(uft(terms, 0.0), model))


@pytest.mark.parametrize("name", [n for n, f in SOLVERS.items() if f])
def test_combined_gradient_is_the_weighted_sum_of_the_two(name, task, tmp_path):
    trainer, terms, grads, model = one_step_terms(name, task, tmp_path)
    s, r = gradient(nll(terms), model), gradient(policy_gradient(terms), model)
    a, b, c = inner_product(s, s), inner_product(s, r), inner_product(r, r)
    w_s, w_r = SOLVERS[name](a, b, c)
    assert_close(grads, [w_s * x + w_r * y for x, y in zip(s, r, strict=True)])
    if name != "gradnorm-ctrl":
        assert trainer.state["cosine"] == pytest.approx(b / math.sqrt(a * c), rel=1e-3)


def test_sdmgrad_takes_its_weights_from_halves_of_the_batch(task, tmp_path):
    trainer, terms, grads, model = one_step_terms("sdmgrad", task, tmp_path)
    demos, rollouts = ([r for r in terms if r.row.is_demo == kind] for kind in (True, False))
    tokens, n = sum(r.n for r in demos), len(rollouts)
    losses = [2 * -sum(r.logp.sum() for r in part) / tokens for part in halves(demos)]
    losses += [2 * sum(surrogate(r).mean() for r in part) / n for part in halves(rollouts)]
    parts = [torch.cat([g.flatten() for g in gradient(loss, model, True)]) for loss in losses]
    stacked = torch.stack(parts)
    cosine = torch.cosine_similarity(stacked[:2].sum(0), stacked[2:].sum(0), dim=0)
    assert trainer.state["cosine"] == pytest.approx(cosine.item(), rel=1e-3)
    (a, b), (c, d) = cross_gram(stacked @ stacked.T, 2)
    # minimize (w + 0.3 p) . A (w + 0.3 p) along w = (x, 1 - x); its derivative is linear in x
    derivative = lambda x: (a - c) * (x + 0.15) + (b - d) * (1 - x + 0.15)  # noqa: E731 - a formula
    slope = derivative(1.0) - derivative(0.0)
    x = min(max(-derivative(0.0) / slope, 0), 1) if slope > 0 else float(derivative(0.5) < 0)
    w_s, w_r = (x + 0.15) / 1.3, (1 - x + 0.15) / 1.3
    truth = w_s * (stacked[0] + stacked[1]) / 2 + w_r * (stacked[2] + stacked[3]) / 2
    assert_close([torch.cat([g.flatten() for g in grads])], [truth])


def test_gradient_source_receives_exact_inner_products(task, tmp_path, monkeypatch):
    calls = []
    read = GradientSignals.read
    monkeypatch.setattr(
        GradientSignals,
        "read",
        lambda self, e, s: (calls.append((e, read(self, e, s))), calls[-1][1])[1],
    )
    _, terms, _, model = one_step_terms("gac", task, tmp_path, BIASED)
    evidence, (reading, _) = calls[0]
    demos, rollouts = ([r for r in terms if r.row.is_demo == kind] for kind in (True, False))
    tokens, n = sum(r.n for r in demos), len(rollouts)
    losses = [2 * -sum((phi(r.p) * r.logp).sum() for r in part) / tokens for part in halves(demos)]
    losses += [2 * sum(surrogate(r).mean() for r in part) / n for part in halves(rollouts)]
    losses.append(nll(terms))
    grads = [gradient(loss, model, True) for loss in losses]
    parts = torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in grads])
    torch.testing.assert_close(evidence.gram, parts[:4] @ parts[:4].T, rtol=1e-4, atol=1e-7)
    sft, rl = parts[:2].mean(0), parts[2:4].mean(0)
    four = torch.stack([sft, rl, parts[4], rl])  # on-policy, the clip does nothing
    torch.testing.assert_close(evidence.bias_gram, four @ four.T, rtol=1e-4, atol=1e-7)
    assert evidence.sft_count == 2
    biases = reading.corrections
    bias = sft - parts[4]  # b_r is 0
    assert biases.bias_gap_sq == pytest.approx((bias @ bias).item(), rel=1e-4)
    assert biases.rl_bias_dot_d == pytest.approx(0, abs=1e-6)


def test_kl_of_a_custom_loss_covers_the_rollouts_only():
    logits = torch.randn(2, 3, 7)
    targets = torch.randint(7, (2, 3))
    logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    ref = logps + torch.tensor([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])
    is_demo = torch.tensor([False, True])
    batch = Batch({}, targets, torch.ones(2), is_demo, (0, 3), torch.tensor([]), None)
    head = Head(None, logits=logits)
    out = custom_loss(
        lambda view: -view.logps,
        head,
        batch,
        mu=0.5,
        spec=LossSpec(),
        norms=TermPair(1.0, 1.0),
        logps=OtherLogps(reference=ref),
    )
    assert out.kl.item() == pytest.approx(
        sum(math.exp(gap) - gap - 1 for gap in (0.1, 0.2, 0.3)) / 3, rel=1e-4
    )
    torch.testing.assert_close(out.logps, logps)
    torch.testing.assert_close(
        out.entropy, torch.distributions.Categorical(logits=logits).entropy()
    )


@pytest.mark.parametrize(
    ("clip", "policy", "expected"),
    [
        ((0.2, 0.3), True, [-1.3, 3.0, -0.5, 1.6]),
        ((0.2, 0.3), False, [-1.3, 3.0, -0.5, 1.6]),
        ((None, None), True, [-1.5, 3.0, -0.5, 1.0]),
    ],
)
def test_policy_loss_is_clipped_off_policy(clip, policy, expected):
    """Ratios 3/2, 3/2, 1/2 and 1/2 with A = 1, -2, 1 and -2; the first token has a KL.

    The ratio also weights that KL.
    """
    targets = torch.zeros(4, 1, dtype=torch.int64)
    old = torch.tensor([[1 / 3], [1 / 3], [1.0], [1.0]]).log()
    advantages, is_demo = torch.tensor([1.0, -2.0, 1.0, -2.0]), torch.zeros(4, dtype=torch.bool)
    batch = Batch({}, targets, advantages, is_demo, (0, 1, 2, 3), torch.tensor([]), None)
    head, ref = Head(None, logits=torch.zeros(4, 1, 2)), torch.tensor([[1.0], *[[0.5]] * 3]).log()
    weighted_kl = {"kl_coef": 0.1, "use_bias_correction_kl": True}
    spec = LossSpec(clip_low=clip[0], clip_high=clip[1], **weighted_kl)
    losses = []
    token_loss = lambda view: losses.append(view.policy_loss) or view.policy_loss  # noqa: E731 - a spy
    out = custom_loss(
        token_loss,
        head,
        batch,
        mu=0.0,
        spec=spec,
        norms=TermPair(1.0, 4.0),
        logps=OtherLogps(old=old, reference=ref),
        policy=policy,
    )
    assert losses[0].tolist() == pytest.approx(expected)
    assert out.clip_fraction == (0.5 if clip[0] and policy else 0)
    assert 4 * out.loss.item() == pytest.approx(sum(expected) + 0.1 * 1.5 * (1 - math.log(2)))


@pytest.mark.parametrize("forward", [True, False])
def test_kl_over_the_vocabulary_by_hand(forward):
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(1, 5, 7, generator=generator)
    hidden, weight = torch.randn(1, 5, 3, generator=generator), torch.randn(7, 3).double()
    bias, scaling = torch.randn(7), (0.7, 1.5)
    reference = 1.5 * torch.tanh(0.7 * (hidden @ weight.T.float() + bias) / 1.5)
    targets = torch.tensor([[1, 2, -100, 3, 4]])
    batch = Batch({}, targets, torch.ones(1), torch.tensor([False]), (0,), torch.tensor([]), None)
    spec = LossSpec(temperature=0.5)
    reference_head = Head(hidden, weight, bias, scaling=scaling)
    out = custom_loss(
        lambda view: view.vocabulary_kl(forward, chunk=3),
        Head(None, logits=ours.requires_grad_()),
        batch,
        mu=0.0,
        spec=spec,
        norms=TermPair(1.0, 1.0),
        reference=reference_head,
    )
    p, q = ((x[targets >= 0] / 0.5).double().log_softmax(-1) for x in (ours, reference))
    if forward:  # KL(q || p)
        p, q = q, p
    truth = (p.exp() * (p - q)).sum(-1).mean()
    assert out.loss.item() == pytest.approx(truth.item(), rel=1e-5)
    gradients = [torch.autograd.grad(x, ours)[0] for x in (out.loss, truth)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_parameter_used_by_one_term_gets_that_terms_weighted_gradient(monkeypatch):
    monkeypatch.setattr("gac.training.probes.CHUNK", 1)
    shared, one_term_only = (torch.nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    parts = GradientParts([("shared", shared), ("lone", one_term_only)], StepNeeds(parts=1))
    (shared * torch.tensor([3.0, 0.0])).sum().backward()
    parts.take()
    (
        (shared * torch.tensor([1.0, 1.0])).sum() + (one_term_only * torch.tensor([0.0, 2.0])).sum()
    ).backward()
    parts.take()
    assert parts.gram().tolist() == [[9.0, 3.0], [3.0, 6.0]]
    parts.combine([0.5, 2.0])
    assert shared.grad.tolist() == [3.5, 2.0]
    assert one_term_only.grad.tolist() == [0.0, 4.0]
    assert parts.parts == []  # frees them


def test_nonfinite_gradients_skip_the_step_and_are_counted(task, tmp_path, monkeypatch):
    trainer = Trainer(tiny_config(task, tmp_path, method={"name": "nash-mtl"}, eval={}))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    broken = torch.tensor([[1.0, math.nan], [math.nan, 1.0]], dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(GradientParts, "gram", lambda self: broken)
        row = trainer._train_step()
    assert row["skipped"] == 1
    assert all(map(torch.equal, before, trainer.model.parameters()))
    row = trainer._train_step()
    assert row["skipped"] == 1
    assert row["grad_norm"] == pytest.approx(1, rel=1e-4)
    assert not any(map(torch.equal, before, trainer.model.parameters()))


# ---- mixing weights over several steps, for known measurements


def mu_trajectory(method, observations: list[Observation]) -> list[float]:
    state, mus = method.init(), []
    for observation in observations:
        state, mix = method.mix(state, observation)
        mus.append(mix.mu)
    return mus


def steps(**columns) -> list[Observation]:
    """Build one Observation per step from columns of values."""
    rows = zip(*columns.values(), strict=True)
    return [Observation(t, **dict(zip(columns, row, strict=True))) for t, row in enumerate(rows)]


MIXES = {
    # kappa = mean(0.02, 0.04) / (1 - 0.58) = 0.0714...; then 1 - KL / kappa
    "kl-ctrl": (
        {"calibration": 2},
        steps(kl=[None, 0.02, math.nan, 0.04, 0.03, 0.05, math.inf, 0.09, None]),
        [*5 * [0.58], *2 * [1 - 0.05 * 0.42 / 0.03], 0.02, 0.02],
    ),
    # c = 0.58 mean(0.2, 0.3); then c / Var, at most 0.98
    "rewvar-ctrl": (
        {"calibration": 2},
        steps(reward_variance=[None, 0.2, 0.3, 0.5, 0.1]),
        [0.58, 0.58, 0.58, 0.58 * 0.250001 / 0.500001, 0.98],
    ),
    "reward-threshold": (
        {},
        steps(reward_mean=[None, 0.1, None, math.nan, 0.49, 0.7, -0.75]),
        [0.5, 0.4, 0.4, 0.4, 0.01, 0.0, 1.0],
    ),
    # s = log-variances: s += 0.1 (exp(-s) L - 1) / 2, for L = 2 and 1 - 0.5
    "uncertainty": (
        {"lr": 0.1},
        steps(demo_loss=[None, 2.0], reward_mean=[None, 0.5]),
        [0.5, math.exp(-0.05) / (math.exp(-0.05) + math.exp(0.025))],
    ),
    # ratios of window means 1 / 2 and 0.5 / 0.5 at temperature 0.5
    "dwa": (
        {"window": 1, "temperature": 0.5},
        steps(demo_loss=[None, 2.0, 1.0], reward_mean=[None, 0.5, 0.5]),
        [0.5, 0.5, math.exp(1) / (math.exp(1) + math.exp(2))],
    ),
    "sft-then-rl": ({"sft_steps": 2, "mu": 0.3}, steps(kl=[None] * 4), [1.0, 1.0, 0.3, 0.3]),
    "wcf": ({}, [Observation(t) for t in (0, 100, 200, 400, 600)], [0, 0.25, 0.5, 0.26, 0.02]),
    "hpcd": ({}, [Observation(t) for t in (0, 100, 200)], [0.9, 0.475, 0.05]),
}


@pytest.mark.parametrize("name", MIXES)
def test_weights_over_several_steps(name):
    fields, observations, expected = MIXES[name]
    assert mu_trajectory(METHODS[name](**fields), observations) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "quantity", "mu"), [("kl-ctrl", "kl", 0.98), ("rewvar-ctrl", "reward_variance", 0.58)]
)
def test_rules_are_finite_if_everything_measured_is_zero(name, quantity, mu):
    mus = mu_trajectory(METHODS[name](calibration=1), steps(**{quantity: [0.0, 0.0, 1.0]}))
    assert mus == pytest.approx([0.58, mu, 0.02])


def test_rules_with_reversed_sign():
    rising = METHODS["kl-ctrl"](calibration=1, sign=-1)
    assert mu_trajectory(rising, steps(kl=[0.02, 0.03])) == pytest.approx([0.58, 0.87])
    rising = METHODS["rewvar-ctrl"](calibration=1, sign=-1)
    assert mu_trajectory(rising, steps(reward_variance=[0.2, 0.1])) == pytest.approx(
        [0.58, 0.29], rel=1e-4
    )


@pytest.mark.parametrize("name", ["multitask", "relift", "hpt", "dypo"])
def test_sft_coef_scales_the_sft_loss(name):
    method = METHODS[name](sft_coef=0.25)
    assert method.mix(method.init(), Observation(0))[1].pair == pytest.approx((0.25, 1.0))


def test_sft_light_stops_on_a_plateau():
    method = METHODS["sft-light"](patience=3, decay=0.0)
    state = method.init()
    for loss in (2.0, 1.0, 1.1, 1.2):
        state, mix = method.mix(state, Observation(1, demo_loss=loss))
        assert not mix.final
    state, mix = method.mix(state, Observation(1, demo_loss=1.0))
    assert mix.final
    assert not METHODS["sft-light"](patience=1).mix(method.init(), Observation(0))[1].final
    assert method.mix(state, Observation(1, demo_loss=math.nan)) == (state, mix)
    state, mix = method.mix(state, Observation(1, demo_loss=0.4))
    assert not mix.final
    assert state == {"average": 0.4, "best": 0.4, "steps_since_best": 0}
    smoothed = METHODS["sft-light"](decay=0.75)
    state, mix = smoothed.mix(state, Observation(1, demo_loss=2.0))
    assert (state, mix) == ({"average": 0.8, "best": 0.4, "steps_since_best": 1}, Mix(1.0))
    state, mix = smoothed.mix(state, Observation(1, demo_loss=0.2))  # one lucky batch
    assert state == {"average": pytest.approx(0.65), "best": 0.4, "steps_since_best": 2}


def test_hpt_soft_gate_weights_rollouts_and_demos(task, tmp_path):
    fields = {"correct": 0.3, "table": (0.9, 0.6, 0.3, 0.1, 0.0)}
    _, terms, grads, model = one_step_terms("hpt", task, tmp_path, fields=fields)
    assert {round(r.row.weight, 6) for r in terms if r.row.is_demo} <= {0.9, 0.6, 0.3, 0.1}
    assert len({r.row.weight for r in terms}) > 3
    rollouts = [r for r in terms if not r.row.is_demo]
    demos = [r for r in terms if r.row.is_demo]
    rl = constant_sum(
        [r.row.weight * (surrogate(r) - 0.001 * r.entropy) for r in rollouts], len(rollouts)
    )
    sft = -sum(r.row.weight * r.logp.sum() for r in demos) / sum(r.n for r in demos)
    assert_close(grads, gradient(rl + sft, model))


def test_hpt_soft_and_hard_gates():
    method = METHODS["hpt"](table=(1.0, 0.7, 0.0, 0.0))
    nan = math.nan  # a dropped rollout does not count as correct
    rewards = torch.tensor([[0.0, nan, 0.0], [1.0, 0.0, nan], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    soft = method.credit(rewards.double(), None, "centered")
    assert soft.rollout_weight.tolist() == [0.0, 1 - 0.7, 1.0, 1.0]
    assert soft.demo_weight.tolist() == [1.0, 0.7, 0.0, 0.0]
    hard = METHODS["hpt"](switch=2).credit(rewards.double(), None, "centered")
    assert hard.demo_weight.tolist() == [1.0, 1.0, 0.0, 1.0]


# ---- GAC and its variants: the controller itself is tested in test_controller.py


def test_the_printed_algorithm_hardly_leaves_its_prior():
    mu_star = (0.7 * 0.4 + 0.5) / (0.4 + 0.1 + 0.5)
    method = METHODS["gac-paper"](max_step=1.0)
    state = method.init()
    for t in range(400):
        state, mix = method.mix(state, Observation(t, signals=Signals(0.1, 0.5, 0.4), kl=0.02))
    assert mix.mu == pytest.approx(0.9901 * method.prior(399) + 0.0099 * mu_star, abs=2e-3)


@pytest.mark.parametrize("name", ["dpo", "dypo"])
def test_pairs_need_the_reference(name):
    targets, logits = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, 3)
    batch = Batch(
        {}, targets, torch.ones(2), torch.zeros(2, dtype=torch.bool), (0, 1), torch.tensor([]), None
    )
    head, norms = Head(None, logits=logits), TermPair(1.0, 1.0)
    with pytest.raises(ValueError, match="ref_logps=None: (pairs|GAL) needs? the reference"):
        custom_loss(METHODS[name]().token_loss, head, batch, mu=0.0, spec=LossSpec(), norms=norms)
