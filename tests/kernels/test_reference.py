"""The reference implementation against hand-computed values, closed-form gradients, gradcheck."""

import math

import pytest
import torch
from torch import Tensor

from gac_kernels import DemoWeight, LossSpec, reference
from gac_kernels.tokens import BatchInputs, plan, scale_for_float16

E = math.e


def one_token(p: float, spec: LossSpec, **keywords) -> tuple[float, float]:
    """Return the loss of one token with probability p, and its derivative with respect to log p.

    With a vocabulary of two and logits (x, 0): d loss / dx = (d loss / d log p) (1 - p).
    """
    x = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64, requires_grad=True)
    logits = torch.stack([x, torch.zeros_like(x)])[None, None]
    demo, advantage = keywords.pop("demo", False), keywords.pop("advantage", 1.0)
    logps = {k: torch.tensor([[v]], dtype=torch.float64) for k, v in keywords.items()}
    out = reference.fused_gac_loss(
        logits,
        torch.tensor([[0]]),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([demo]),
        mu=1.0 if demo else 0.0,
        spec=spec,
        **logps,
    )
    (grad,) = torch.autograd.grad(out.loss, x)
    assert out.clip_fraction == out.moments.clip_fraction == (grad == 0)
    return out.loss.item(), grad.item() / (1 - p)


LOG4 = math.log(4)  # -log p for p = 1/4

DEMONSTRATIONS = [
    # weight, c, advantage, p -> loss, d loss / d log p
    ("one", 0.1, 9.0, 0.25, LOG4, -1.0),
    ("p", 0.1, 9.0, 0.25, LOG4 / 4, -0.25),
    ("phi", 0.1, 9.0, 0.25, LOG4 * 3 / 16, -0.1875),
    ("shaped", 0.25, 1.0, 0.25, -0.5, -0.25),  # -p/(p+c); derivative -p c / (p+c)^2
    ("shaped", 0.25, -2.0, 0.25, 1.0, 0.5),
    ("trust", 0.1, 9.0, 0.25, -1.0, -1.0),  # p above c: -p/p, gradient -p/p
    ("trust", 0.5, 9.0, 0.25, -0.5, -0.5),  # p below c: -p/c
]


@pytest.mark.parametrize(("weight", "c", "advantage", "p", "loss", "slope"), DEMONSTRATIONS)
def test_demonstration_token(weight, c, advantage, p, loss, slope) -> None:
    spec = LossSpec(demo_weight=weight, demo_shape=c)
    assert one_token(p, spec, demo=True, advantage=advantage) == pytest.approx(
        (loss, slope), rel=1e-12
    )


ROLLOUTS = {
    # name: (p / p_old, advantage, spec, loss, d loss / d log p), p = 1/4, clip 0.2 unless stated
    "ratio 1": (1.0, 2.0, LossSpec(), -2.0, -2.0),
    "inside the clip": (1.1, 2.0, LossSpec(), -2.2, -2.2),
    "A > 0 above the clip: no gradient": (1.5, 2.0, LossSpec(), -2.4, 0.0),
    "A > 0 below the clip: gradient": (0.5, 2.0, LossSpec(), -1.0, -1.0),
    "A < 0 below the clip: no gradient": (0.5, -2.0, LossSpec(), 1.6, 0.0),
    "A < 0 above the clip: gradient": (1.5, -2.0, LossSpec(), 3.0, 3.0),
    "clip-higher": (1.25, 2.0, LossSpec(clip_high=0.28), -2.5, -2.5),
    "no upper clip": (1.5, 2.0, LossSpec(clip_high=None), -3.0, -3.0),
    "no lower clip": (0.5, -2.0, LossSpec(clip_low=None), 1.0, 1.0),
    "dual clip, beyond": (4.0, -2.0, LossSpec(dual_clip=3.0), 6.0, 0.0),
    "dual clip, within": (2.0, -2.0, LossSpec(dual_clip=3.0), 4.0, 4.0),
    "dual clip does not affect A > 0": (0.5, 2.0, LossSpec(dual_clip=3.0), -1.0, -1.0),
}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_rollout_token(name: str) -> None:
    ratio, advantage, spec, loss, slope = ROLLOUTS[name]
    actual = one_token(0.25, spec, advantage=advantage, old_logps=math.log(0.25 / ratio))
    assert actual == pytest.approx((loss, slope), rel=1e-12, abs=1e-15)


def test_missing_old_logps_mean_on_policy() -> None:
    """Without old_logps, the ratio is 1 and has a gradient."""
    assert one_token(0.25, LossSpec(), advantage=2.0) == pytest.approx((-2.0, -2.0), rel=1e-12)


ESTIMATORS = {
    # with advantage 0 and ref = log p + 1, kl_coef 2: the value and derivative of 2 kl
    "k1": (-2.0, 2.0),
    "k2": (1.0, -2.0),
    "k3": (2 * (E - 2), 2 * (1 - E)),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_estimator(name: str) -> None:
    spec = LossSpec(kl_coef=2.0, kl_estimator=name)
    actual = one_token(0.25, spec, advantage=0.0, ref_logps=math.log(0.25) + 1)
    assert actual == pytest.approx(ESTIMATORS[name], rel=1e-12)


def test_the_entropy_of_peaked_rows_does_not_cancel() -> None:
    """logsumexp - sum p z would lose the digits of a small entropy among large logits."""
    logits = torch.tensor([[x, x - 8, -x] for x in (301.7, 433.3, 877.1)], dtype=torch.float64)
    targets = torch.zeros(3, dtype=torch.int64)
    entropies = [reference.token_logprobs(x, targets)[1] for x in (logits.float(), logits)]
    torch.testing.assert_close(entropies[0].double(), entropies[1], rtol=1e-4, atol=0)


def test_entropy_bonus() -> None:
    """H = log 4 - 3/4 log 3 for (1/4, 3/4); dH/dx = -p (1 - p) x, so dH / d log p = -p x."""
    loss, slope = one_token(0.25, LossSpec(entropy_coef=0.5), advantage=0.0)
    assert loss == pytest.approx(-0.5 * (math.log(4) - 0.75 * math.log(3)), rel=1e-12)
    assert slope == pytest.approx(0.5 * 0.25 * math.log(1 / 3), rel=1e-12)


def test_temperature_divides_the_logits_and_the_gradient() -> None:
    logits = torch.tensor([[[2.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    out = reference.fused_gac_loss(
        logits,
        torch.tensor([[0]]),
        torch.ones(1),
        torch.tensor([True]),
        mu=1.0,
        spec=LossSpec(demo_weight="one", temperature=2.0),
    )
    (grad,) = torch.autograd.grad(out.loss, logits)
    p = 1 / (1 + math.exp(-1))
    assert out.loss.item() == pytest.approx(-math.log(p), rel=1e-12)
    assert grad.flatten().tolist() == pytest.approx([(p - 1) / 2, (1 - p) / 2], rel=1e-12)


REDUCTIONS = {
    # rollouts of 3, 1 and 0 tokens, every token with loss -1 (A = 1 on-policy)
    "sequence": (LossSpec(), None, -1.0),
    "token": (LossSpec(rollout_reduction="token"), None, -1.0),
    "constant": (LossSpec(rollout_reduction="constant", max_tokens=4), None, -4 / 12),
    "sequence, global norm": (LossSpec(), 5.0, -2 / 5),
    "token, global norm": (LossSpec(rollout_reduction="token"), torch.tensor(8), -4 / 8),
    "constant, global norm": (LossSpec(rollout_reduction="constant", max_tokens=4), 10, -4 / 40),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str) -> None:
    spec, norm, loss = REDUCTIONS[name]
    out = reference.fused_gac_loss(
        torch.randn(3, 3, 2),
        torch.tensor([[0, 1, 0], [1, -100, -100], [-100, -100, -100]]),
        torch.ones(3),
        torch.zeros(3, dtype=torch.bool),
        spec=spec,
        rollout_norm=norm,
        mu=0.5,
    )
    assert out.rollout_loss.item() == pytest.approx(loss, rel=1e-6)
    assert out.loss.item() == pytest.approx(loss / 2, rel=1e-6)
    assert out.demo_loss == 0


def small_batch(**keywords) -> tuple[Tensor, dict]:
    """Return the logits of three rollouts and two demonstrations, and all other arguments."""
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(5, 4, 6, generator=g, dtype=torch.float64)
    targets = torch.randint(0, 6, (5, 4), generator=g)
    targets[0, 2:] = targets[3, 1] = -100
    logps, _ = reference.token_logprobs(logits, targets)
    noise = torch.randn(2, 5, 4, generator=g, dtype=torch.float64) / 2
    arguments = {
        "targets": targets,
        "advantages": torch.randn(5, generator=g, dtype=torch.float64),
        "is_demo": torch.tensor([False, False, True, True, False]),
        "old_logps": logps + noise[0],
        "ref_logps": logps + noise[1],
        "mu": 0.3,
    }
    return logits.requires_grad_(), arguments | keywords


DIFFERENTIABLE = {
    "clip and k3": LossSpec(kl_coef=0.1, demo_weight="one"),
    "k1 and entropy": LossSpec(
        kl_coef=0.1, kl_estimator="k1", entropy_coef=0.1, demo_weight="shaped"
    ),
    "k2, dual clip, temperature": LossSpec(
        kl_coef=0.1, kl_estimator="k2", dual_clip=1.2, temperature=0.7, demo_weight="one"
    ),
    "no clip, constant": LossSpec(
        None,
        None,
        demo_weight="shaped",
        rollout_reduction="constant",
        demo_reduction="sequence",
        max_tokens=5,
    ),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name: str) -> None:
    """Options without a detached weight, away from the kinks of the clip."""
    logits, arguments = small_batch(spec=DIFFERENTIABLE[name])
    assert torch.autograd.gradcheck(
        lambda x: reference.fused_gac_loss(x, **arguments).loss, logits, atol=1e-8
    )


def test_gradcheck_of_the_log_probabilities() -> None:
    logits, arguments = small_batch()
    targets = arguments["targets"]
    assert torch.autograd.gradcheck(lambda x: reference.token_logprobs(x, targets), logits)
    assert torch.autograd.gradgradcheck(lambda x: reference.token_logprobs(x, targets), logits)


COEFFICIENTS = {
    # d demo_t / d logp where the weight is detached
    DemoWeight.ONE: lambda p: -torch.ones_like(p),
    DemoWeight.P: lambda p: -p,
    DemoWeight.PHI: lambda p: -p * (1 - p),
    DemoWeight.TRUST: lambda p: -p / p.clamp(min=0.2),
}


@pytest.mark.parametrize("weight", COEFFICIENTS, ids=lambda w: w.value)
def test_detached_weights_match_the_closed_form_gradient(weight: DemoWeight) -> None:
    """The gradient is c_t (onehot - softmax) / temperature / number of tokens."""
    spec = LossSpec(demo_weight=weight, demo_shape=0.2, temperature=1.3)
    logits, arguments = small_batch(spec=spec, is_demo=torch.ones(5, dtype=torch.bool), mu=1.0)
    (grad,) = torch.autograd.grad(reference.fused_gac_loss(logits, **arguments).loss, logits)
    targets = arguments["targets"]
    mask = targets != -100
    softmax = (logits.detach() / 1.3).softmax(-1)
    onehot = torch.nn.functional.one_hot(targets.clamp(min=0), 6)
    p = softmax.gather(-1, targets.clamp(min=0)[..., None])
    expected = COEFFICIENTS[weight](p) * (onehot - softmax) / 1.3 / mask.sum()
    torch.testing.assert_close(grad, expected * mask[..., None], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("scale", "advantage", "changes", "spec", "power"),
    [
        (0.3, 2.0, {}, LossSpec(), 0.5),
        (0.5, 2.0, {}, LossSpec(), 1.0),
        (0.0, 2.0, {}, LossSpec(), 1.0),
        (math.inf, 2.0, {}, LossSpec(), 1.0),
        (0.3, -3 * 2.0**14, {}, LossSpec(), 4.0),  # 0.3 x 3 x 2^14 / 2^12 = 3.6
        (0.3, -3 * 2.0**14, {}, LossSpec(temperature=0.4), 16.0),  # 3.6 / 0.4 = 9
        (0.3, -3 * 2.0**14, {"factor": 3.0}, LossSpec(), 16.0),  # 3.6 x 3 = 10.8
        (0.3, 0.1, {"factor": 2.0**15}, LossSpec(), 4.0),  # 0.3 x 2^15 / 2^12 = 2.4
        (0.3, 2.0, {"factor": 1e-3}, LossSpec(), 0.5),
        (0.3, 2.0**14, {"rollout_logps": -1.0}, LossSpec(correction_max=3.0), 4.0),  # 1.2 x 3
        (0.3, 2.0**14, {"rollout_logps": -1.0}, LossSpec(correction_max=None), 2.0**13),
        (0.3, 2.0**14, {"rollout_logps": -1.0}, LossSpec(correction_max=1e9), 2.0**13),
        (0.3, 2.0, {"ref": 40.0, "old": 0.0}, LossSpec(kl_coef=-0.1, temperature=0.5), 256.0),
    ],
)
def test_float16_scales_keep_weights_and_weighted_advantages_in_range(
    scale: float, advantage: float, changes: dict, spec: LossSpec, power: float
) -> None:
    """The power of two above the largest weight, or above weight times advantage / 2^12."""
    batch = BatchInputs(torch.tensor([[0, 0]]), torch.zeros(1), torch.zeros(1).bool())
    columns = {"scale": scale, "advantages": advantage, **changes}
    tokens = plan(batch, LossSpec())._replace(
        **{name: torch.tensor([value, 0.0]) for name, value in columns.items()}
    )
    inv_scale, scaled = scale_for_float16(tokens, spec, torch.float16)
    assert inv_scale == power
    assert scaled.scale.tolist() == [torch.tensor(scale) / power, 0]
    assert scale_for_float16(tokens, spec, torch.bfloat16) == (None, tokens)
    assert scale_for_float16(tokens.at(slice(0, 0)), spec, torch.float16)[0] == 1


def test_only_the_loss_requires_grad() -> None:
    logits, arguments = small_batch()
    fields = reference.fused_gac_loss(logits, **arguments)._asdict().items()
    assert [n for n, x in fields if isinstance(x, torch.Tensor) and x.requires_grad] == ["loss"]


def test_an_unlikely_demonstration_with_a_reference_has_a_finite_gradient() -> None:
    """exp(ref - logp) overflows, but the KL term applies only to rollouts."""
    logits = torch.tensor([[[0.0, 200.0]]], requires_grad=True)
    out = reference.fused_gac_loss(
        logits,
        torch.tensor([[0]]),
        torch.ones(1),
        torch.tensor([True]),
        ref_logps=torch.zeros(1, 1),
        spec=LossSpec(kl_coef=0.1, demo_weight="one"),
        mu=0.5,
    )
    (grad,) = torch.autograd.grad(out.loss, logits)
    assert grad.flatten().tolist() == [-0.5, 0.5]
