"""Extreme values in every backend: nan and infinity, overflow, impossible tokens, peaked rows."""

import functools
import math

import pytest
import torch
from torch import Tensor

from gac_kernels import LossSpec, backends, fused_gac_loss, reference, token_logprobs
from gac_kernels.contract import CHOICES
from gac_kernels.tokens import BatchInputs, Scaling, Upstream
from tests.kernels.cases import BY_NAME, build, check, each_backend, in_float64

# The interpreter of Triton computes on inf and nan in NumPy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


BAD = {
    "nan": 0x7FC00000,
    "negative nan": -0x00400000,
    "nan with a payload": 0x7F800001,
    "inf": 0x7F800000,
}


@pytest.mark.sampled
@each_backend
@pytest.mark.parametrize("place", [0, 2047, 2100], ids=["first", "end of a tile", "last"])
@pytest.mark.parametrize("name", BAD)
def test_bad_logits_give_a_nan_loss(name: str, place: int, backend: str) -> None:
    logits, targets = torch.randn(1, 2, 2101), torch.tensor([[1, 3]])
    logits.view(torch.int32)[0, 1, place] = BAD[name]
    check_nan_in_second_row(logits, targets, backend, None)


@each_backend
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_row_of_minus_infinity_or_a_capped_infinity_gives_a_nan_loss(
    softcap: float | None, backend: str
) -> None:
    for bad in (torch.inf, torch.full((101,), -torch.inf)):
        logits = torch.randn(1, 2, 101)
        logits[0, 1, slice(None) if isinstance(bad, torch.Tensor) else 50] = bad
        check_nan_in_second_row(logits, torch.tensor([[1, 3]]), backend, softcap)


def check_nan_in_second_row(
    logits: Tensor, targets: Tensor, backend: str, softcap: float | None
) -> None:
    # with advantage 0, the row has no gradient but is still read
    for advantage, policy in ((1.0, "clip"), (0.0, "clip"), (0.0, "reinforce")):
        leaf, advantages = logits.clone().requires_grad_(), torch.full((1, 2), advantage)
        options = {"spec": LossSpec(policy_loss=policy), "softcap": softcap, "backend": backend}
        out = fused_gac_loss(leaf, targets, advantages, **options)
        assert out.loss.isnan()
        assert out.logps[0, 1].isnan()
        assert out.entropy[0, 1].isnan()
        assert out.logps[0, 0].isfinite()
        out.loss.backward()
        first, second = leaf.grad[0]
        assert first.isfinite().all()
        assert advantage == 0 or second.isnan().all()


@each_backend
def test_a_target_outside_the_vocabulary_is_nan_and_not_read(backend: str) -> None:
    """A row with nan or infinity has no largest logit."""
    targets, nan = torch.tensor([8, -1, 2**40, 2, 1, 2, 2]), [1.0, 5.0, torch.nan, *[0.0] * 5]
    logits = torch.tensor([[*[[0.0] * 8] * 4, nan, nan, [0.0, 1.0, torch.inf, *[0.0] * 5]]])
    rows = backends.load(backend, targets.device)
    results = rows.row_stats(logits, targets, Scaling(1.0), more_outputs=True)
    logps, entropy, lse, *_, is_top1 = results
    assert logps[[0, 1, 2, 4, 5, 6]].isnan().all()
    assert not is_top1.any()
    torch.testing.assert_close(torch.stack([-logps[3], entropy[3], lse[3]]), lse[:3])


@each_backend
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_entropy_gradient_with_an_impossible_target(softcap: float | None, backend: str) -> None:
    """A target of probability 0 adds 0 log 0 = 0 to the entropy, and its gradient is 0."""
    logits = torch.tensor([[[-torch.inf, 0.5, 1.0, -1.0]]])
    grads = []
    for dtype, name in ((torch.float32, backend), (torch.float64, "reference")):
        leaf = logits.to(dtype).detach().clone().requires_grad_()
        call = functools.partial(token_logprobs, backend=name)
        logps, entropy = call(leaf, torch.zeros(1, 1).long(), softcap=softcap)
        assert logps == -torch.inf
        entropy.sum().backward()
        grads.append(leaf.grad.double())
    assert grads[0][0, 0, 0] == 0
    assert grads[1].abs().max() > 0.1
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-7)


@each_backend
def test_only_rows_without_an_upstream_gradient_get_zeros(backend: str) -> None:
    """Even if their logits are nan."""
    logits, targets = torch.randn(1, 6, 5), torch.tensor([1, 2, 3, 4, 0, -100])
    logits[0, 0] = torch.nan
    d_logps, d_entropy = torch.tensor([[0.0, 1, -1, 0, 0, 1], [0.0, 0, 0, 1, -1, 1]])
    ones, out = torch.ones(6), torch.full_like(logits, torch.nan)
    rows = backends.load(backend, logits.device)
    rows.row_grads(logits, targets, Scaling(1.0), Upstream(ones, ones, d_logps, d_entropy), out)
    assert (out[0] != 0).any(-1).tolist() == [False, True, True, True, True, False]


@each_backend
@pytest.mark.parametrize(("advantage", "bonus"), [(1.0, 0.0), (0.0, 1.0)])
def test_coefficients_of_exactly_1_are_not_skipped(
    advantage: float, bonus: float, backend: str
) -> None:
    logits, targets = torch.randn(2, 2, 5), torch.randint(5, (2, 2))
    inputs = targets, torch.tensor([advantage, -advantage]), torch.zeros(2).bool()
    keywords = {"mu": 0.0, "rollout_norm": 1.0}
    for coefficient in (bonus, -bonus):
        spec = LossSpec(rollout_reduction="sum", entropy_coef=coefficient)
        leaf = logits.clone().requires_grad_()
        fused_gac_loss(leaf, *inputs, spec=spec, **keywords, backend=backend).loss.backward()
        assert (leaf.grad != 0).any(-1).all()


@each_backend
def test_float16_gradients_of_large_advantages_do_not_overflow(backend: str) -> None:
    """Only the intermediate gradient exceeds float16's range.

    It is 12,000 (advantage) / 0.05 (temperature) / 2 (1 - p) = 120,000; divided by 30 (tokens times
    norm), the result is 4,000.
    """
    logits = torch.zeros(1, 2, 2, dtype=torch.float16, requires_grad=True)
    targets, spec = torch.tensor([[1, 1]]), LossSpec(temperature=0.05)
    out = fused_gac_loss(
        logits,
        targets,
        torch.tensor([-12e3]),
        torch.tensor([False]),
        mu=0.0,
        spec=spec,
        rollout_norm=15.0,
        backend=backend,
    )
    (grad,) = torch.autograd.grad(out.loss, logits)
    torch.testing.assert_close(
        grad.float(), torch.tensor([-4e3, 4e3]).expand(1, 2, 2), rtol=2e-3, atol=0.0
    )
    # unscaled, from float32 logits as in the linear form: bounded
    rows, out = backends.load(backend, logits.device), torch.empty(1, 2, 2, dtype=torch.float16)
    inputs = BatchInputs(targets, torch.tensor([-1e5]), torch.tensor([False]), 0.0)
    rows.row_loss(logits.detach().float(), rows.plan(inputs, LossSpec()), spec, out)
    assert out.isfinite().all()


@each_backend
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_float16_gradients_of_a_large_kl_do_not_overflow(
    temperature: float, on_policy: bool, backend: str
) -> None:
    """Its derivative is 0.1 exp(15) = 330,000, or 2,600 if divided by 128 (tokens times norm).

    Without old log-probs it is not known in advance, and is bounded at 2^15 times a scale of 2^-6.
    """
    logits, batch, keywords = unlikely_token(ref=15.0)
    keywords |= {"rollout_norm": 64.0} | ({"old_logps": None} if on_policy else {})
    keywords["spec"] = LossSpec(kl_coef=0.1, temperature=temperature)
    keywords = {k: x.half() if isinstance(x, torch.Tensor) else x for k, x in keywords.items()}
    truth = loss_and_logits_grad(logits.half().double(), batch, keywords, "reference")[1]
    out, grad = loss_and_logits_grad(logits.half(), batch, keywords, backend)
    if on_policy:
        truth[0, 0] *= -512 * out.logps[0, 0].expm1() / truth[0, 0, 1].abs()
    assert ((grad - truth).abs() / truth.abs().amax(-1, keepdim=True)).max() < 2e-3


UNBOUNDED = {"clip_low": None, "clip_high": None}
BOUNDS = [{}, {"dual_clip": 1.5, "use_bias_correction_kl": True}]
BOUNDS += [UNBOUNDED, {**UNBOUNDED, "use_bias_correction_kl": True}]


@each_backend
@pytest.mark.parametrize("policy", CHOICES["policy_loss"])
def test_ratios_far_from_1(policy: str, backend: str) -> None:
    """Above exp(40), the ratio is clamped, with gradient 0: it weighs the KL as a constant."""
    log_ratios = torch.tensor([60, 39, 3, -3, -41, -60.0])[:, None]
    logits, targets = torch.randn(6, 3, 31), torch.randint(31, (6, 3))
    logps, _ = token_logprobs(logits.double(), targets, backend="reference")
    advantages = torch.tensor([1, 0, -1.0]).expand(6, 3)
    columns = (logps - log_ratios).float(), (logps + 2).float()
    inputs = BatchInputs(targets, advantages, torch.zeros(6).bool(), 0.0, *columns)
    rows = backends.load(backend, logits.device)
    for options in BOUNDS:
        spec = LossSpec(policy_loss=policy, kl_coef=0.1, **options)
        tokens, out = rows.plan(inputs, spec), torch.empty_like(logits)
        terms, exact = rows.row_loss(logits, tokens, spec, out), torch.empty_like(logits).double()
        truth = reference.row_loss(logits.double(), in_float64(tokens), spec, exact)
        # relative to the row's largest gradient, with the rounding of the log-probabilities
        scale = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        torch.testing.assert_close((out / scale).double(), exact / scale, rtol=0, atol=1e-4)
        for name, ours, theirs in zip(terms._fields, terms, truth, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-6, msg=name)
        if policy == "clip" and options is UNBOUNDED:
            by_hand = 0.1 * (math.exp(2) - 3) - advantages * log_ratios.clamp(max=40).exp()
            torch.testing.assert_close(terms.loss.view(6, 3), by_hand, rtol=1e-4, atol=1e-6)
    spec, tokens = LossSpec(policy_loss="sapo"), tokens._replace(old=torch.full((18,), torch.nan))
    assert rows.row_loss(logits, tokens, spec, out).loss.isnan().all()
    assert out.isnan().all()


@each_backend
@pytest.mark.parametrize("coefficient", [0.1, 0.0])
@pytest.mark.parametrize(("ref", "dtype"), [(100.0, torch.float32), (800.0, torch.float16)])
def test_a_k3_overflow_makes_loss_and_gradient_non_finite(
    ref: float, dtype: torch.dtype, coefficient: float, backend: str
) -> None:
    """But not if the KL is only reported. An infinite derivative is not bounded for float16."""
    logits, batch, keywords = unlikely_token(ref=ref)
    keywords |= {"spec": LossSpec(kl_coef=coefficient), "old_logps": None}
    out, grad = loss_and_logits_grad(logits.to(dtype), batch, keywords, backend)
    assert out.kl == torch.inf
    assert out.loss.isfinite() == (coefficient == 0)
    assert grad.isfinite().all() == (coefficient == 0)


@each_backend
def test_the_ratio_to_the_log_probs_of_the_same_logits_is_exactly_1(backend: str) -> None:
    """The previous call's outputs are old and reference log-probs; neither bound leaves a gap."""
    batch = build(BY_NAME["entropy"])
    spec = LossSpec(clip_low=0.0, clip_high=0.0, temperature=0.7)
    args = batch.logits(), *batch.inputs
    logps = fused_gac_loss(*args, spec=spec, backend=backend, mu=0.5).logps
    columns = {"old_logps": logps, "ref_logps": logps}
    out = fused_gac_loss(*args, spec=spec, backend=backend, **columns, mu=0.5)
    assert out.clip_fraction == 0
    assert out.kl == 0


def unlikely_token(old: float = 0.0, ref: float = 0.0):
    """Build a rollout of two tokens; the first has the given logp - old and ref - logp."""
    logits = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(0)).double()
    targets = torch.tensor([[1, 3]])
    logps, _ = token_logprobs(logits, targets, backend="reference")
    first = torch.tensor([[1.0, 0.0]])
    keywords = {
        "mu": 0.0,
        "spec": LossSpec(kl_coef=0.1),
        "old_logps": (logps - old * first).float(),
        "ref_logps": (logps + ref * first).float(),
    }
    return logits, (targets, torch.ones(1), torch.tensor([False])), keywords


def loss_and_logits_grad(logits, batch, keywords, backend):
    """Return the outputs and the gradient with respect to the logits."""
    leaf = logits.detach().requires_grad_()
    same_dtype = {
        k: x.to(leaf.dtype) if isinstance(x, torch.Tensor) else x for k, x in keywords.items()
    }
    out = fused_gac_loss(leaf, *batch, **same_dtype, backend=backend)
    return out, torch.autograd.grad(out.loss, leaf)[0]


@each_backend
def test_float16_gradients_of_a_long_mean_do_not_vanish(backend: str) -> None:
    """With demo_norm = 2^24, float16 gradients of order 2^-24 underflow unless they are scaled."""
    logits = torch.randn(2, 3, 11, dtype=torch.float16, requires_grad=True)
    targets, is_demo = torch.randint(0, 11, (2, 3)), torch.tensor([True, True])
    spec = LossSpec(demo_weight="one")

    def grad(call, x, **keywords):
        out = call(
            x, targets, torch.ones(2), is_demo, mu=1.0, spec=spec, demo_norm=2.0**24, **keywords
        )
        return torch.autograd.grad(out.loss * 2.0**24, x)[0]

    truth = grad(reference.fused_gac_loss, logits.detach().double().requires_grad_())
    torch.testing.assert_close(
        grad(fused_gac_loss, logits, backend=backend).double(), truth, rtol=2e-3, atol=1e-6
    )


@each_backend
def test_weight_or_advantage_0_removes_an_impossible_token(backend: str) -> None:
    """The token's log-probability is -inf; its loss is 0, not nan. Also if the weight is that of
    the token's term, or its probability.
    """
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 1] = -torch.inf
    logits.requires_grad_()
    targets, share, ones = torch.tensor([[1, 2]]), torch.tensor([[0.0, 1.0]]), torch.ones(1)
    demo, rollout, first = [True], [False], [[True, False]]
    for is_demo, policy, demo_weight, weights, advantages, mu in (
        (demo, "clip", "one", share, ones, 0.5),
        (demo, "clip", "p", None, ones, 0.5),
        (demo, "clip", "phi", None, ones, 0.5),
        (first, "clip", "one", None, ones, 0.0),
        (first, "clip", "one", None, ones, torch.tensor(0.0)),
        (rollout, "reinforce", "one", share, ones, 0.5),
        (rollout, "reinforce", "one", None, share, 0.5),
        (rollout, "cispo", "one", None, share, 0.5),
    ):
        spec = LossSpec(policy_loss=policy, demo_weight=demo_weight)
        arguments = logits, targets, advantages, torch.tensor(is_demo)
        keywords = {"weights": weights, "old_logps": -torch.ones(1, 2), "spec": spec, "mu": mu}
        out = fused_gac_loss(*arguments, **keywords, backend=backend)
        (grad,) = torch.autograd.grad(out.loss, logits)
        assert out.loss.isfinite()
        assert (grad[0, 0] == 0).all()
        assert (grad[0, 1] != 0).any()


NORMAL = torch.randn(2500, generator=torch.Generator().manual_seed(0))
ROWS = {
    "a large offset": NORMAL + 1000,
    "one likely entry": torch.where(torch.arange(2500) == 1500, 60.0, NORMAL),
    "every tile has a new maximum": torch.linspace(-300, 300, 2500),
    "the maximum is in the first tile": torch.linspace(300, -300, 2500),
    "the dtype's minimum as a mask": torch.where(torch.arange(2500) < 1400, -3.4e38, 1.0),
    "huge logits": torch.linspace(-1e38, 1e38, 2500),
}


@each_backend
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_any_shape_keep_their_precision(name: str, backend: str) -> None:
    logits, targets = ROWS[name].expand(1, 2, 2500), torch.tensor([[2000, 1500]])
    ours = token_logprobs(logits, targets, backend=backend)
    same_dtype = token_logprobs(logits, targets, backend="reference")
    truth = token_logprobs(logits.double(), targets, backend="reference")
    for label, *values in zip(("logps", "entropy"), ours, same_dtype, truth, strict=True):
        check(label, *values, floor=4.0)


@each_backend
def test_rounding_does_not_change_the_signs_of_statistics(backend: str) -> None:
    """If one token has all the mass, its log-probability and the entropy are 0."""
    logits = torch.full((1, 16, 40), -30.0)
    logits[0, :, 3] = torch.linspace(30, 60, 16)
    logps, entropy = token_logprobs(
        logits, torch.full((1, 16), 3), temperature=0.7, backend=backend
    )
    assert (logps <= 0).all()
    assert (logps > -2e-6).all()
    assert (entropy >= 0).all()
    assert (entropy < 2e-6).all()


@each_backend
def test_a_row_of_minima(backend: str) -> None:
    """Its entries are equally likely, and the first is the most likely one."""
    if backend == "triton":
        pytest.skip("its logits are in base 2, where the minimum is -inf, as a mask is")
    logits = torch.full((1, 3, 2500), torch.finfo(torch.float32).min)
    logits[0, 2, 30:] = 1
    rows = backends.load(backend, logits.device)
    targets = torch.tensor([0, 1, 30])
    *_, is_top1 = rows.row_stats(logits, targets, Scaling(1.0), more_outputs=True)
    assert is_top1.tolist() == [1, 0, 1]
    if backend == "reference":
        return  # its logps are differences from a logsumexp, which rounds them to 0
    logps, entropy, _ = rows.row_stats(logits, targets, Scaling(1.0))
    assert -logps[0] == entropy[0] == pytest.approx(math.log(2500), rel=1e-6)


@each_backend
def test_a_token_without_scale_has_a_zero_gradient_even_if_its_logits_are_nan(backend: str) -> None:
    logits, spec = torch.randn(2, 2, 300), LossSpec(demo_weight="one")
    rows = backends.load(backend, logits.device)
    inputs = BatchInputs(torch.tensor([[1, 2], [3, 4]]), torch.ones(2), torch.ones(2).bool(), 0.5)
    tokens = rows.plan(inputs, spec)
    tokens.scale[2] = 0
    logits[1, 0, 7] = torch.nan
    out = torch.full_like(logits, torch.nan)
    terms = rows.row_loss(logits, tokens, spec, out)
    assert terms.logps[2].isnan()
    assert (out[1, 0] == 0).all()
    assert (out[1, 1] != 0).all()


@each_backend
@pytest.mark.parametrize("gap", [0.49, -0.49, 0.2, 0.6])
def test_kl_without_cancellation(gap: float, backend: str) -> None:
    """The series near 0 and the formula beyond it, both to float32 precision."""
    fields = torch.zeros(1, 1, 4), torch.zeros(1, 1).long(), torch.zeros(1)
    ref = torch.full((1, 1), gap - math.log(4))
    out = fused_gac_loss(*fields, ref_logps=ref, backend=backend)
    d = (ref.double() - out.logps.double()).item()
    assert out.kl.item() == pytest.approx(math.expm1(d) - d, rel=4e-7)
