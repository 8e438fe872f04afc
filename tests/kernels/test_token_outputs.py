"""Log-prob functions: further outputs, logit scale and softcap, against float64 autograd."""

import math

import pytest
import torch
from torch import Tensor

from gac_kernels import linear_token_logprobs, token_logprobs
from gac_kernels.contract import MORE_OUTPUTS
from tests.kernels.cases import each_backend

SCALES = {
    "plain": {},
    "temperature and scale": {"temperature": 0.7, "logit_scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"temperature": 1.3, "logit_scale": 0.5, "softcap": 2.0},
}
each_scale = pytest.mark.parametrize("name", SCALES)


def expected(
    x: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> list[Tensor]:
    """All outputs of the distributions of x [..., V], where -inf masks an entry, in x's dtype."""
    z = logit_scale * x
    if softcap is not None:
        z = torch.where(x == -math.inf, x, softcap * torch.tanh(z / softcap))
    z = z / temperature
    log_p = z.log_softmax(-1)
    live = targets != -100
    logp = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0)).sum(-1)
    outputs = [logp, entropy, (2 * log_p).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets]
    return [torch.where(live, v, 0) for v in outputs]


def batch(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(width)
    logits = (3 * torch.randn(2, 4, width, generator=g)).to(dtype)
    targets = torch.randint(width, (2, 4), generator=g)
    targets[0, 0] = logits[0, 0].argmax()
    targets[0, 3] = -100
    logits[1, 1] = logits[1, 1].round()
    logits[1, 1, -2:] = 12.0  # a tie of the largest logit: only the first counts
    targets[1, 1] = width - 1
    logits[1, 2, -2:] = 12.0
    targets[1, 2] = width - 2
    if dtype == torch.float32:
        logits[1, 3, 0] = -math.inf
        targets[1, 3] = 1
    return logits, targets


@pytest.mark.sampled
@each_scale
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 67, 2051])
def test_outputs_and_gradients(name: str, backend: str, dtype: torch.dtype, width: int) -> None:
    logits, targets = batch(width, dtype)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    ours = token_logprobs(leaf, targets, **SCALES[name], outputs=MORE_OUTPUTS, backend=backend)
    truth = expected(exact, targets, **SCALES[name])
    assert ours[4].dtype == torch.bool
    assert torch.equal(ours[4], truth[4].bool())
    assert not any(x.requires_grad for x in ours[2:])
    for value, true in zip(ours[:4], truth[:4], strict=True):
        assert value.shape == targets.shape
        torch.testing.assert_close(value.double(), true, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, 8).view(2, 4)
    for logps, entropy, *_ in (ours, truth):  # in place: they are no views, nor saved
        (logps.mul_(weights) + entropy.mul_(weights.flip(0))).sum().backward()
    precision = {"atol": 2e-6, "rtol": 1e-5}
    if dtype != torch.float32:
        precision = {"atol": 1e-4, "rtol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(leaf.grad.double(), exact.grad, **precision)


@each_scale
@each_backend
def test_linear_form(name: str, backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=g), torch.randn(31, 8, generator=g)
    bias, targets = torch.randn(31, generator=g), torch.randint(31, (9,), generator=g)
    targets[3] = -100
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    keywords = {"bias": bias, **SCALES[name], "backend": backend, "chunk_bytes": 1000}
    outputs = ("is_top1", "mean_logits")  # in the caller's order
    ours = linear_token_logprobs(hidden, weight, targets, outputs=outputs, **keywords)
    truth = expected(wide[0] @ wide[1].T + wide[2], targets, **SCALES[name])
    assert torch.equal(ours[2], truth[4].bool())
    for value, true in zip(
        (ours[0], ours[1], ours[3]), (truth[0], truth[1], truth[3]), strict=True
    ):
        torch.testing.assert_close(value.double(), true, rtol=1e-5, atol=1e-5)
    # some tokens have a gradient of the log-prob only, and some of the entropy only
    weights = torch.arange(9) % 3
    for logps, entropy, *_ in (ours, truth):
        (logps.mul_(weights) - entropy.mul_(2 * weights.flip(0))).sum().backward()
    for leaf, exact in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (linear_token_logprobs(hidden, weight, targets)[0].sum() * targets.zero_()).sum().backward()


@each_backend
def test_without_request_nothing_changes(backend: str) -> None:
    logits, targets = batch(67, torch.float32)
    plain = token_logprobs(logits, targets, backend=backend)
    more = token_logprobs(logits, targets, outputs=("is_top1",), backend=backend)
    assert len(plain) == 2
    assert len(more) == 3
    for a, b in zip(plain, more[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "keywords", "message"),
    [
        (
            ValueError,
            {"outputs": ("top1",)},
            r"outputs=\('top1',\): use a tuple with any of log_sum_sq_probs",
        ),
        (ValueError, {"outputs": "is_top1"}, "outputs='is_top1': use a tuple"),
        (ValueError, {"outputs": ("is_top1",) * 2}, "outputs=.*, each once"),
        (ValueError, {"softcap": 0.0}, "softcap=0.0: use a finite number > 0"),
        (ValueError, {"softcap": math.nan}, "softcap=nan: use a finite number > 0"),
        (ValueError, {"logit_scale": -1.0}, "logit_scale=-1.0: use a finite number > 0"),
        *(
            (ValueError, {"temperature": value}, f"temperature={value}: use a finite number > 0")
            for value in (0, 0.0, -1.0, math.nan, math.inf)
        ),
        *(
            (TypeError, {"temperature": value}, f"temperature={value}: use a number")
            for value in (None, True)
        ),
    ],
)
def test_invalid_options(error: type[Exception], keywords: dict, message: str) -> None:
    with pytest.raises(error, match=message):
        token_logprobs(torch.zeros(1, 1, 3), torch.zeros(1, 1).long(), **keywords)
    with pytest.raises(error, match=message):
        linear_token_logprobs(
            torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1).long(), **keywords
        )
