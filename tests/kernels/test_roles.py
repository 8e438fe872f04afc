"""Optional advantages, roles and mu, and temperatures of sequences and tokens, in every loss."""

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

from gac_kernels import (
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    loss_from_logprobs,
    reference,
    token_logprobs,
)
from gac_kernels.checks import complete
from tests.kernels.cases import each_backend

B, T, H, V = 3, 5, 4, 17


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets and advantages."""
    g = torch.Generator().manual_seed(0)
    targets = torch.randint(V, (B, T), generator=g)
    targets[1, 2:] = -100
    rows = [torch.randn(*s, generator=g, dtype=torch.float64) for s in ((B, T, H), (V, H), (B,))]
    hidden, weight, advantages = (x.to(dtype) for x in rows)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, advantages


def loss_of(form: str, *roles: Tensor | None, backend: str = "native", **keywords):
    """A loss's value and its gradient with respect to the hidden states."""
    hidden, weight, targets, _ = data()
    if form == "linear":
        out = fused_linear_gac_loss(hidden, weight, targets, *roles, backend=backend, **keywords)
    elif form == "logits":
        out = fused_gac_loss(hidden @ weight.T, targets, *roles, backend=backend, **keywords)
    else:
        out = loss_from_logprobs(
            token_logprobs(hidden @ weight.T, targets)[0], targets, *roles, **keywords
        )
    return out.loss, *torch.autograd.grad(out.loss, hidden)


@each_backend
@pytest.mark.parametrize("form", ["linear", "logits", "logprobs"])
def test_omitted_roles_give_the_only_term_the_weight_1(form: str, backend: str) -> None:
    *_, advantages = data()
    demos, spec = torch.ones(B).bool(), LossSpec(demo_weight="one")
    keywords = {"backend": backend, "spec": spec}
    grpo = loss_of(form, advantages, ~demos, mu=0.0, **keywords)
    sft = loss_of(form, torch.zeros(B), demos, mu=1.0, **keywords)
    for expected, roles in (
        (grpo, (advantages,)),
        (sft, ()),
        (sft, (None, demos)),
    ):
        assert all(
            torch.equal(a, b)
            for a, b in zip(loss_of(form, *roles, **keywords), expected, strict=True)
        )
    torch.testing.assert_close(2 * loss_of(form, advantages, mu=0.5, **keywords)[0], grpo[0])


def test_a_missing_mu_or_advantage_is_an_error() -> None:
    *_, advantages = data()
    mixed = torch.tensor([True, False, True])
    shaped = LossSpec(demo_weight="shaped")
    for form, (roles, spec, message) in itertools.product(
        ("linear", "logits", "logprobs"),
        (
            ((advantages, mixed), LossSpec(), "mu is None: a batch with advantages and is_demo"),
            ((None, mixed), LossSpec(), "advantages is None: rollouts"),
            ((), shaped, "advantages is None: .*'shaped'"),
            ((None, torch.ones(B)), LossSpec(), "is_demo has dtype torch.float32: use bool"),
            ((None, torch.ones(B + 1) > 0), LossSpec(), r"is_demo has shape \[4\]: expected \[3\]"),
            ((None, [True] * B), LossSpec(), "is_demo is a list: use a tensor"),
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            loss_of(form, *roles, spec=spec)


def test_roles_are_decided_without_reading_the_device() -> None:
    _, _, targets, advantages = data()
    mixed = torch.tensor([True, False, True])
    inputs = complete(targets, None, mixed.to("meta"))  # reading it would be an error
    assert inputs.is_demo.is_meta
    assert inputs.mu == 1.0
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        assert complete(targets, None, mixed).is_demo.tolist() == [True] * B
    assert complete(targets, advantages).is_demo is False
    assert complete(targets, advantages).all_roles().tolist() == [False] * B


@pytest.mark.sampled
@each_backend
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("per_token", [False, True])
def test_temperatures_equal_float64_autograd(
    backend: str, softcap: float | None, per_token: bool
) -> None:
    """Of both losses and both log-prob functions, with a logit scale, in one pass and in two.

    Temperatures of half precision are scaled in the dtype of the arithmetic.
    """
    g = torch.Generator().manual_seed(1)
    temperature = (torch.rand(*((B, T) if per_token else (B,)), generator=g) + 0.5).bfloat16()
    if per_token:
        temperature[1, 3] = torch.nan  # where there is no loss
    roles, old = torch.tensor([True, False, False]), -torch.rand(B, T, generator=g)

    def results(dtype: torch.dtype, **keywords) -> list[Tensor]:
        hidden, weight, targets, advantages = data(dtype)
        own = keywords.get("backend") is not None
        x = hidden @ weight.T
        found: list[Tensor] = []
        for level in ("token", "sequence"):
            spec = LossSpec(importance_sampling_level=level, entropy_coef=0.1, kl_coef=0.1)
            batch = {"mu": 0.4, "spec": spec, "old_logps": old, "ref_logps": old, **keywords}
            batch |= {"temperatures": temperature, "softcap": softcap, "logit_scale": 0.7}
            inputs = targets, advantages, roles
            losses = (
                (fused_gac_loss if own else reference.fused_gac_loss)(x, *inputs, **batch),
                (fused_linear_gac_loss if own else reference.fused_linear_gac_loss)(
                    hidden, weight, *inputs, **batch
                ),
            )
            for out in losses:
                grads = torch.autograd.grad(out.loss, (hidden, weight), retain_graph=True)
                found += [out.loss, out.logps, out.entropy, *grads]
        scaling = {"temperature": temperature, "softcap": softcap, "logit_scale": 0.7, **keywords}
        functions = (token_logprobs, linear_token_logprobs)
        if not own:
            functions = (reference.token_logprobs, reference.linear_token_logprobs)
        for function, rows in zip(functions, ((x,), (hidden, weight)), strict=True):
            logps, entropy = function(*rows, targets, **scaling)
            total = logps.sum() + (entropy**2).sum()
            found += [logps, *torch.autograd.grad(total, (hidden, weight), retain_graph=True)]
        return found

    truth = results(torch.float64)
    by_hand = torch.distributions.Categorical(logits=_logits(temperature, softcap))
    targets = data()[2]
    logps = by_hand.log_prob(targets.clamp(min=0)).where(targets != -100, 0.0)
    torch.testing.assert_close(truth[1], logps, rtol=1e-9, atol=1e-9)
    for ours, expected in zip(results(torch.float32, backend=backend), truth, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=2e-5)


def _logits(temperature: Tensor, softcap: float | None) -> Tensor:
    hidden, weight, *_ = data(torch.float64)
    z = 0.7 * hidden.detach() @ weight.detach().T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return z / temperature.view(B, -1).expand(B, T).nan_to_num(1.0).double()[..., None]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([1.0, -1.0, 1.0]), r"temperatures\[1\] = -1.0: use finite numbers > 0"),
        (torch.ones(2), r"temperatures has shape \[2\]: expected \[3\] or \[3, 5\]"),
        (torch.ones(3).int(), "temperatures has dtype torch.int32"),
        (torch.ones(3).requires_grad_(), "temperatures requires a gradient, which it cannot get"),
    ],
)
def test_invalid_temperatures(value: Tensor, message: str) -> None:
    *_, advantages = data()
    with pytest.raises((TypeError, ValueError), match=message):
        loss_of("linear", advantages, temperatures=value, logit_scale=2.0)
