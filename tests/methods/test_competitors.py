"""Methods with a teacher, a collection, a meta-gradient or random prefixes: numbers by hand."""

import math

import pytest
import torch
from torch import Tensor

from gac.control.schedules import MixSchedule
from gac.methods import METHODS, Observation
from gac.models.head import Head
from gac.rollouts.samples import Sample
from gac.rows import Batch
from gac.training.token_loss import OtherLogps, custom_loss
from gac.training.trainer import Trainer
from gac.types import Credit, TermPair
from gac_kernels import LossOutput, LossSpec, fused_gac_loss
from gac_kernels.projection import Projection
from tests.tiny import tiny_config

LOG2 = math.log(2)


def one_token_rows(name: str, p: list[float], **keywords) -> tuple[LossOutput, Tensor]:
    """The method's loss on rows of one token with probabilities `p`, and d loss / d log p."""
    x = torch.tensor([math.log(q / (1 - q)) for q in p], requires_grad=True)
    logits = torch.stack([x, torch.zeros_like(x)], -1)[:, None]
    n = len(p)
    advantages = torch.tensor(keywords.pop("advantages"))
    targets, mu = torch.zeros(n, 1, dtype=torch.int64), keywords.pop("mu", 0.0)
    is_demo = torch.tensor(keywords.pop("is_demo", [False] * n))
    batch = Batch({}, targets, advantages, is_demo, tuple(range(n)), torch.tensor([]), None)
    loss = METHODS[name](**keywords.pop("fields", {})).loss(LossSpec())
    norms = TermPair(demo=2.0, rollout=float(n))
    head = Head(None, logits=logits)
    out = custom_loss(loss.token, head, batch, mu=mu, spec=loss.spec, norms=norms, **keywords)
    (grad,) = torch.autograd.grad(out.loss, x)
    return out, grad / (1 - torch.tensor(p))


def test_sdar_gates_the_distillation_of_each_token() -> None:
    """log p = -log 4; a teacher with p = 1/2, 1/8 and none: D = log 2, -log 2; 2^5 = 32."""
    teacher = torch.tensor([0.5, 0.125, math.nan]).log()[:, None]
    out, slope = one_token_rows(
        "sdar", [0.25] * 3, advantages=[2.0, -1.0, 0.5], logps=OtherLogps(teacher=teacher)
    )
    distilled = 0.01 * (32 / 33 * LOG2 - 1 / 33 * LOG2)
    assert out.loss.item() == pytest.approx((-2 + 1 - 0.5 + distilled) / 3, rel=1e-6)
    assert (3 * slope).tolist() == pytest.approx([-2 - 0.32 / 33, 1 - 0.01 / 33, -0.5], rel=1e-6)


@pytest.mark.parametrize(
    ("direction", "kl", "slope"),
    [
        ("forward", 0.5 * LOG2 + 0.5 * math.log(2 / 3), -0.25),
        ("reverse", -0.25 * LOG2 + 0.75 * math.log(1.5), -0.1875 * math.log(3)),
    ],
)
def test_asft_adds_the_kl_to_the_reference(direction: str, kl: float, slope: float) -> None:
    """A demonstration with p = 1/4, and a reference with 1/2; the slope is that of the logit."""
    out, slope_by_logp = one_token_rows(
        "asft",
        [0.25],
        advantages=[0.0],
        is_demo=[True],
        mu=1.0,
        fields={"kl_weight": 0.3, "kl_direction": direction},
        reference=Head(None, logits=torch.zeros(1, 1, 2)),
    )
    assert 2 * out.loss.item() == pytest.approx(0.25 * 2 * LOG2 + 0.3 * kl, rel=1e-6)
    assert 2 * slope_by_logp.item() * 0.75 == pytest.approx(-0.25 * 0.75 + 0.3 * slope, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("dpo", {"beta": 0.5}, math.log(1.25)),  # -log sigmoid(2 log 2)
        ("ipo", {"tau": 0.2}, (2.5 * LOG2 - 2.5) ** 2),
        ("ipo", {"tau": 0.2, "normalize": False}, (4 * LOG2 - 2.5) ** 2),
    ],
)
def test_preferences_by_hand(name: str, fields, expected: float) -> None:
    """Log-ratios log 2 and 2 log 2 of the tokens of the better response, -log 2 of the other."""
    method, targets = METHODS[name](**fields), torch.tensor([[0, 0], [0, -100]])
    logits = torch.zeros(2, 2, 2, requires_grad=True)
    ref = torch.log(torch.tensor([[0.25, 0.125], [1.0, 7.0]]))
    loss = method.loss(LossSpec())
    for rows, pairs in ((targets, 1), (targets[:1].new_full((1, 2), -100), 0)):
        n = len(rows)
        batch = Batch(
            {},
            rows,
            torch.ones(n),
            torch.zeros(n, dtype=torch.bool),
            (0, 2)[:n],
            torch.tensor([]),
            None,
        )
        out = custom_loss(
            loss.token,
            Head(None, logits=logits[:n]),
            batch,
            mu=0.0,
            spec=loss.spec,
            norms=TermPair(1.0, 2.0),
            logps=OtherLogps(reference=ref[:n]),
        )
        assert out.loss.item() == pytest.approx(pairs * expected, rel=1e-6)
        (grad,) = torch.autograd.grad(out.loss, logits)
        assert grad.isfinite().all()
        assert bool(grad.any()) == bool(pairs)


def test_srft_options_by_hand() -> None:
    """p = 1/2 has entropy log 2; of the incorrect rollouts, with A = -1, one is below the limit."""
    out, slope = one_token_rows(
        "srft",
        [0.5, 0.25, 0.5, 0.5, 0.5],
        advantages=[3.0, -1.0, -1.0, 1.0, 0.0],
        is_demo=[True, False, False, False, False],
        mu=0.5,
        fields={"shape": 0.25, "least_logp": -1.5 * LOG2},
    )
    demo, rollouts = 0.5 * 0.5 * LOG2 - 3 * 0.5 / 0.75, -1.5 * LOG2 - LOG2 + 0.1 * 2 * LOG2
    assert 2 * out.loss.item() == pytest.approx(demo / 2 + rollouts / 5, rel=1e-6)
    # d/dlog p of p / (p + c) is p c / (p + c)^2
    expected = [-0.25 / 2 - 3 * 0.5 * 0.25 / 0.75**2 / 2, 0, 1 / 5, -0.2 / 5, 0]
    assert (2 * slope).tolist() == pytest.approx(expected, rel=1e-6)


def test_srft_with_phi_weights_the_cross_entropy_alone() -> None:
    """p = 1/2 has entropy log 2 and phi = 1/4, which is not differentiated."""
    out, slope = one_token_rows(
        "srft",
        [0.5, 0.5],
        advantages=[3.0, 0.0],
        is_demo=[True, False],
        mu=0.5,
        fields={"weight": "phi"},
    )
    expected = 0.5 * 0.5 * 0.25 * LOG2 - 3 * 0.5
    assert 2 * out.loss.item() == pytest.approx(expected / 2, rel=1e-6)
    expected_slope = -0.5 * 0.5 * 0.25 - 3 * 0.5
    assert (2 * slope).tolist() == pytest.approx([expected_slope / 2, 0], rel=1e-6)


def test_relift_trains_on_the_newest_unsolved_prompts_once_there_are_enough(task, tmp_path) -> None:
    method = {"name": "relift", "buffer": 5, "correct": 2.0}  # no prompt is ever solved
    trainer = Trainer(tiny_config(task, tmp_path, method=method, eval={}))
    order = trainer.feed.prompt_order.take(8)
    trainer.feed.prompt_order.position = 0
    demos = []
    for _ in range(2):
        rows = trainer._sample()
        trainer.step += 1
        demos.append([row for row in rows if row.is_demo])
    assert demos[0] == []
    newest = [trainer.feed.prompts[i] for i in order[-5:]]
    assert [row.ids for row in demos[1]] == [x.prompt + x.demo for x in newest]
    assert trainer.feed.state_dict()["collected"] == order[:3]


def test_amft_follows_the_slope_of_the_reward_and_the_entropy() -> None:
    method = METHODS["amft"](warmup=1, meta_lr=10.0, entropy_lr=0.5, update_every=2)
    assert [(needs.rollouts, needs.parts) for needs in map(method.needs, range(5))] == [
        (False, 0),
        *[(True, 2), (True, 0)] * 2,
    ]
    state, mix = method.mix(method.init(), Observation(0))
    assert mix.mu == 1.0
    state, mix = method.mix(state, Observation(1, entropy=math.nan, lr=0.1))
    assert mix.mu == 0.8
    # s1, s2, r1, r2: <s1, r2> = 0.5, <r1, s2> = 0.1 and <r1, r2> = 0.4: (0.5 + 0.1) / 2 - 0.4
    gram = torch.zeros(4, 4, dtype=torch.float64)
    gram[0, 3], gram[2, 1], gram[2, 3] = 0.5, 0.1, 0.4
    gram = gram + gram.T
    state, weights = method.solve(state, gram, mix)
    assert weights == pytest.approx((0.8, 0.2))
    assert method.report(state) == {"reward_slope": pytest.approx(-0.1), "entropy_target": None}
    # 10 * 0.1 * -0.1; the first entropy is the target
    state, mix = method.mix(state, Observation(2, entropy=1.5, lr=0.1))
    assert mix.mu == pytest.approx(0.7)
    state, mix = method.mix(state, Observation(3, entropy=1.3, lr=0.1))  # 0.5 * 0.2
    assert mix.mu == pytest.approx(0.8)
    for unmeasured in (Observation(4), Observation(4, entropy=math.nan, lr=0.1)):
        state, mix = method.mix(state, unmeasured)
        assert mix.mu == pytest.approx(0.8)
    assert method.mix({**state, "slope": 9.0}, Observation(5, entropy=1.5))[1] == mix  # no lr
    assert method.mix(state, Observation(5, entropy=-9.0, lr=0.1))[1].mu == 0.95


class Draws:
    """A random generator with given draws."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()


def test_uft_hints_are_binomial_with_a_probability_that_falls() -> None:
    method = METHODS["uft"](low=0.1, high=0.9, hint_steps=4, pieces=3)
    # after (t + 1) / 4 of the curriculum: 0.5 + 0.4 cos(pi / 4), 0.5, 0.5 - 0.4 cos(pi / 4), 0.1
    for step, p in enumerate([0.5 + 0.4 * math.sqrt(0.5), 0.5, 0.5 - 0.4 * math.sqrt(0.5), 0.1]):
        # 2 of 3 parts of 7 tokens: 4.67
        assert method.hint_tokens(step, 8, Draws(p - 1e-6, p + 1e-6, p - 1e-6)) == 5
    # after the last step with hints; only an EOS
    assert method.hint_tokens(4, 8, Draws()) == method.hint_tokens(0, 1, Draws()) == 0
    assert [method.hint_tokens(0, 3, Draws(0.0, x)) for x in (0.0, 1.0)] == [2, 1]  # two parts
    assert METHODS["uft"](coef=0.25).mix({}, Observation(0))[1].pair == pytest.approx((0.25, 1.0))


def test_prefix_rft_lengths_and_the_tokens_that_are_trained() -> None:
    low = MixSchedule(peak=0.9, valley=0.1, decay=2)
    method = METHODS["prefix-rft"](low=low, high=0.9, top=0.5)
    # 0.9, 0.5 + 0.4 / 4 and 0.1 + 0.8 / 4 of 11 tokens
    assert [method.prefix_tokens(t, 11, Draws(0.25)) for t in (0, 1, 2, 9)] == [9, 6, 3, 3]
    assert METHODS["prefix-rft"](high=1.0).prefix_tokens(0, 10, Draws(1.0)) == 9
    assert METHODS["prefix-rft"](high=0.5).prefix_tokens(0, 10, Draws(0.25)) == 5
    # two sampled tokens and three of a prefix: of p = 0.5, 0.9 and 0.7, the entropy of 0.9 is the
    # lowest, and ceil(0.5 * 3) = 2 tokens are trained
    p = torch.tensor([0.2, 0.4, 0.5, 0.9, 0.7], dtype=torch.float64)
    x = (p / (1 - p)).log().float().requires_grad_()
    logits = torch.stack([x, torch.zeros_like(x)], -1)[None]
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    targets, advantage = torch.zeros(1, 5, dtype=torch.int64), torch.tensor([2.0, 3.0])
    batch = Batch(
        {}, targets, advantage, torch.tensor([False, True]), (0,), torch.tensor([]), bounds
    )
    loss = method.loss(LossSpec(max_tokens=10))
    head, norms = Head(None, logits=logits), TermPair(1.0, 1.0)
    out = custom_loss(loss.token, head, batch, mu=0.5, spec=loss.spec, norms=norms)
    assert 2 * out.loss.item() == pytest.approx(-(2.0 + 3.0) * 2 / 10)
    (grad,) = torch.autograd.grad(2 * out.loss, x)
    expected = [-0.2 * 0.8, -0.2 * 0.6, -0.3 * 0.5, 0, -0.3 * 0.3]
    assert grad.tolist() == pytest.approx(expected, rel=1e-6)


def test_dypo_contrasts_successes_and_failures_of_one_prompt() -> None:
    """Log-ratios log 2, 0, log 4 with A = 1, -1, -1 in one prompt; 0, 0, log 2 with -1, 1, 0 in
    another; and a demonstration with p = 1/4, whose reference is unknown.
    """
    method = METHODS["dypo"](alpha=0.25, beta=2.0)
    p = torch.tensor([0.5, 0.25, 0.8, 0.5, 0.5, 0.5, 0.25])
    x = (p / (1 - p)).log().requires_grad_()
    logits = torch.stack([x, torch.zeros_like(x)], -1)[:, None]
    ref = (p / torch.tensor([2.0, 1.0, 4.0, 1.0, 1.0, 2.0, math.nan])).log()[:, None]
    targets = torch.zeros(7, 1, dtype=torch.int64)
    units = torch.tensor([7, 7, 7, 2, 2, 2, 5])
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0, 1.0, 0.0, 1.0])
    batch = Batch({}, targets, advantages, torch.arange(7) == 6, tuple(range(7)), units, None)
    loss, head = method.loss(LossSpec()), Head(None, logits=logits)
    norms = TermPair(demo=1.0, rollout=6.0)
    logps = OtherLogps(reference=ref)
    out = custom_loss(loss.token, head, batch, mu=0.5, spec=loss.spec, norms=norms, logps=logps)
    # -log sigmoid(2 log 2) = log(5 / 4), -log sigmoid(-2 log 2) = log 5, -log sigmoid(0) = log 2
    gal = [(math.log(5 / 4) + math.log(5)) / 2] * 3 + [LOG2] * 3
    grpo = [-1.0, 1.0, 1.0, 1.0, -1.0, 0.0]
    expected = sum(0.25 * a + 0.75 * b for a, b in zip(grpo, gal, strict=True)) / 6 + 2 * LOG2
    assert 2 * out.loss.item() == pytest.approx(expected, rel=1e-5)
    (grad,) = torch.autograd.grad(2 * out.loss, x)
    slope = grad / (1 - p)
    # a pair has the slope -2 sigmoid(-2 d): -2/5 for d = log 2, -8/5 for -log 2, -1 for 0; in a
    # group of n rows with m pairs, it counts n / m times
    pairs = [3 / 2 * (-2 / 5 - 8 / 5), 3 / 2 * 2 / 5, 3 / 2 * 8 / 5, 3.0, -3.0, 0.0]
    expected = [(0.25 * a + 0.75 * b) / 6 for a, b in zip(grpo, pairs, strict=True)]
    assert slope.tolist() == pytest.approx([*expected, -1.0], rel=1e-5)


def test_dypo_grades_prompts_by_their_rollouts() -> None:
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, math.nan], [math.nan] * 2])
    credit = METHODS["dypo"]().credit(rewards, None, "std")
    assert [x.tolist() for x in credit[2:]] == [
        [0.0, 1.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0, 0.0],
    ]


def test_dypo_trains_whole_groups_only(task, tmp_path) -> None:
    method = {"name": "dypo", "correct": 0.4}
    trainer = Trainer(tiny_config(task, tmp_path, method=method, eval={}, micro_batch_size=5))
    assert trainer.feed.unit == trainer.gradients.forward.micro.unit == 4
    example, credit = trainer.feed.prompts[0], Credit(*(torch.ones(4), *torch.ones(3)))
    kept = [Sample(example.prompt, (), (3, 4), 1.0, False, False)] * 3
    dropped = Sample(example.prompt, (), (3, 4), math.nan, False, False)
    assert [row.is_demo for row in trainer.sampler._rows(example, [*kept, dropped], credit)] == [1]
    assert len(trainer.sampler._rows(example, [*kept, kept[0]], credit)) == 5


def test_sdar_reserves_the_length_of_the_teachers_context(task, tmp_path) -> None:
    trainer = Trainer(tiny_config(task, tmp_path, method={"name": "sdar"}, eval={}))
    longest = max(2 * len(e.prompt) + len(e.demo) for e in trainer.feed.prompts)
    assert trainer.feed.longest_row(5) == longest + 5
    contexts = {row.context for row in trainer._sample()}
    assert contexts <= {e.prompt + e.demo for e in trainer.feed.prompts}


def test_echo_is_the_fused_loss_with_a_role_per_token() -> None:
    """Two sampled tokens with A = 2, two observations with p = 1/2 and 1/4, and lambda = 0.05."""
    p = torch.tensor([0.3, 0.5, 0.25, 0.6])
    logits = torch.stack([(p / (1 - p)).log(), torch.zeros(4)], -1)[None]
    observation = torch.tensor([[False, True, True, False]])
    spec = LossSpec(demo_weight="one", rollout_reduction="token", demo_reduction="token")
    targets, advantage = torch.zeros(1, 4, dtype=torch.int64), torch.tensor([2.0])
    out = fused_gac_loss(logits, targets, advantage, observation, mu=0.05 / 1.05, spec=spec)
    assert 1.05 * out.loss.item() == pytest.approx(-2.0 + 0.05 * 1.5 * LOG2, rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"kl_coef": 0.2, "entropy_coef": 0.1}])
def test_sdar_takes_one_pass_over_the_logits(changes: dict, monkeypatch) -> None:
    """Its token loss needs no sums over sequences, so 6 N H V FLOPs give what 8 gave."""
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731 - a shorthand
    targets = torch.randint(11, (3, 4), generator=g)
    targets[1, 2:] = -100
    teacher = torch.where(normal(3, 4) > 0, -normal(3, 4).abs(), math.nan)
    batch = Batch(
        {}, targets, normal(3), torch.zeros(3, dtype=torch.bool), (0, 1, 2), torch.tensor([]), None
    )
    loss = METHODS["sdar"]().loss(LossSpec(temperature=0.8, **changes))
    leaves = normal(3, 4, 5), normal(11, 5)
    old, ref = -normal(3, 4).abs(), -normal(3, 4).abs()
    rows, logits = [], Projection.logits
    monkeypatch.setattr(
        Projection, "logits", lambda self, x, *a: rows.append(len(x)) or logits(self, x, *a)
    )
    results = []
    for per_token in (False, loss.per_token):
        hidden, weight = (x.clone().requires_grad_() for x in leaves)
        options = {
            "mu": 0.0,
            "spec": loss.spec,
            "norms": TermPair(1.0, 10.0),
            "logps": OtherLogps(old=old, reference=ref, teacher=teacher),
        }
        head = Head(hidden, weight)
        out = custom_loss(loss.token, head, batch, **options, per_token=per_token)
        grads = torch.autograd.grad(out.loss, (hidden, weight))
        scalars = out.loss, out.rollout_loss, out.kl, out.logps, out.entropy, out.moments.totals
        results.append((*scalars, *grads))
        rows.append(0)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    # of the first, the backward pass skips a clipped token without a teacher
    assert sum(rows[: rows.index(0)]) >= 19
    assert sum(rows[rows.index(0) :]) == 10
