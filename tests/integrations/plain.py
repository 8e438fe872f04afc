"""Reference gradients of full optimizer steps, in plain log-softmax code."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gac.rows import Row, collate


def logprobs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, temperature: float = 1.0
) -> Tensor:
    """[B, T - 1]: log-probability of each token after the first."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1].float()
    logits = logits / temperature
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def demo_term(model: Any, rows: Sequence[Row], *, weight: str) -> Tensor:
    """The demonstration loss of a step: - sum f(p) / number of tokens.

    weight: "one" is f(p) = log p, "phi" is p (1 - p) log p, "shaped" is p / (p + 0.1).
    """
    total, tokens = torch.zeros(()), 0
    for row in rows:
        logps = logprobs(model, **collate([row], 0).model_inputs)[:, row.start - 1 :]
        p = logps.detach().exp()
        shaped = 1 / (1 + 0.1 * (-logps).exp())
        total -= {"one": logps, "phi": p * (1 - p) * logps, "shaped": shaped}[weight].sum()
        tokens += logps.numel()
    return total / tokens


def rollout_term(
    model: Any, batches: Iterable[Mapping[str, Tensor]], temperature: float, reduction: str
) -> Tensor:
    """The policy gradient term of a step without clipping, from prompt and completion tensors.

    reduction: "token" is the mean over all completion tokens, "sequence" the mean of the
        per-completion token means.
    """
    total, count = torch.zeros(()), 0
    for batch in batches:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        completion_mask = batch["completion_mask"]
        logps = logprobs(model, ids, mask, temperature)[:, -completion_mask.shape[1] :]
        term = -batch["advantages"][:, None] * logps * completion_mask
        if reduction == "token":
            total, count = total + term.sum(), count + int(completion_mask.sum())
        else:
            total, count = total + (term.sum(1) / completion_mask.sum(1)).sum(), count + len(term)
    return total / count


def teacher_term(
    model: Any,
    teacher: Any,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    temperature: float,
    loss: str,
    top_k: int = 0,
) -> Tensor:
    """The teacher's loss of a step, in the models' dtype: the mean over all completion tokens.

    loss: "k2" and "k3" are of the sampled token, "forward_kl" and "reverse_kl" of the teacher's
        `top_k` likeliest tokens and one bin for all others.
    """
    total, count = torch.zeros(()), 0
    for batch in batches:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        length = batch["completion_mask"].shape[1]
        own, other = (
            (m(input_ids=ids, attention_mask=mask).logits / temperature).log_softmax(-1)
            for m in (model, teacher)
        )
        own, other = own[:, -length - 1 : -1], other[:, -length - 1 : -1].detach()
        if top_k:
            chosen = other.topk(top_k).indices
            pair = [x.gather(-1, chosen) for x in (own, other)]
            q, p = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in pair)
            first, second = (q, p) if loss == "reverse_kl" else (p, q)
            terms = (first.exp() * (first - second)).sum(-1)
        else:
            sampled = batch["completion_ids"][..., None]
            gap = (other - own).gather(-1, sampled)[..., 0]
            terms = gap**2 / 2 if loss == "k2" else gap.expm1() - gap
        trained = batch["completion_mask"] != 0
        total, count = total + terms[trained].sum(), count + int(trained.sum())
    return total / count


def gradient(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of `loss` for each trainable parameter."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(named.items(), grads, strict=True)
    }


def relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest absolute difference, divided by the largest expected entry."""
    assert set(actual) == set(expected)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0
    return max(float((actual[n] - expected[n]).abs().max()) for n in expected) / largest
