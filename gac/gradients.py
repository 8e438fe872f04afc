"""From rows to gradients: micro-batches, log-probs of other policies, the fused loss, backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gac_kernels import LossSpec, TokenMoments

from .batch import Batch, Row, collate, split
from .experience import place
from .methods import Mix


class Measured(NamedTuple):
    """What one step's forward passes found, on this rank."""

    moments: TokenMoments
    rollout_loss: Tensor  # 0-d: this rank's share, so that the mean over ranks is the term
    demo_loss: Tensor  # 0-d


class Gradients:
    """Accumulates the gradient of the mixed loss into the model's parameters.

    Args:
        model: the prepared policy. reference: the frozen initial policy; None = the policy
            without its adapters.
        spec: the loss. temperature: of the rollouts; demonstrations are scored at 1.
        micro_batch: rows per forward; None = all rows of a kind.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        reference: nn.Module | None,
        spec: LossSpec,
        *,
        temperature: float,
        micro_batch: int | None,
        pad_token: int,
    ) -> None:
        self.accelerator, self.model, self.reference = accelerator, model, reference
        self.spec, self.temperature = spec, temperature
        self.micro_batch, self.pad_token = micro_batch, pad_token

    def __call__(
        self,
        rows: Sequence[Row],
        mix: Mix,
        norms: tuple[float, float],
        *,
        kl: bool,
        old_logps: Sequence[Tensor] = (),
    ) -> Measured:
        """Forward all rows, backward those that can move a weight.

        norms: global denominators of the rollout and the demonstration term, divided by the
            number of ranks, because gradients are averaged over ranks.
        kl: also measure the KL to the reference policy.
        old_logps: log-probs of the sampling policy by `Row.index`; empty = on-policy.
        """
        live = [r for r in rows if not self._silent(r, mix)]
        dead = [r for r in rows if self._silent(r, mix)]
        total, losses = TokenMoments.zeros(self.accelerator.device), []
        # those without gradient first: no forward may run between the last backward and the update
        for part, grad in ((dead, False), (live, True)):
            micro_batches = self._schedule(part)
            for i, micro in enumerate(micro_batches):
                last = i == len(micro_batches) - 1
                out = self._forward(micro, mix, norms, kl, old_logps, grad=grad, sync=last)
                total = total + out.moments
                losses.append(torch.stack([out.rollout_loss, out.demo_loss]))
        found = torch.stack(losses).sum(0) if losses else torch.zeros(2)
        return Measured(total, found[0], found[1])

    def _silent(self, row: Row, mix: Mix) -> bool:
        """Whether the row's gradient is known to be zero, so that it costs no backward."""
        if row.is_demo:
            return mix.mu == 0
        still = row.advantage == 0 and self.spec.kl_coef == 0 and self.spec.entropy_coef == 0
        return mix.mu == 1 or still

    def _schedule(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Micro-batches of one kind each; every rank gets the same number, some of them empty."""
        micro = [
            list(part)
            for kind in (False, True)
            for part in split([r for r in rows if r.is_demo == kind], self.micro_batch)
        ]
        most = int(over_ranks(self.accelerator, [len(micro)], "max")[0])
        return micro + [[] for _ in range(most - len(micro))]

    def _forward(
        self,
        rows: list[Row],
        mix: Mix,
        norms: tuple[float, float],
        kl: bool,
        old_logps: Sequence[Tensor],
        *,
        grad: bool,
        sync: bool,
    ) -> Any:
        batch = collate(rows, self.pad_token, self.accelerator.device)
        demo = bool(rows) and rows[0].is_demo
        spec = dataclasses.replace(self.spec, temperature=1.0 if demo else self.temperature)
        ref = self._reference_logprobs(batch, demo) if kl else None
        old = None
        if old_logps and rows and not demo:
            old = place([old_logps[r.index] for r in rows], rows, batch.targets)

        def request(head: Any) -> Any:
            return head.loss(
                batch.targets, batch.advantages, batch.is_demo, mu=mix.mu, old_logps=old,
                ref_logps=ref, spec=spec, rollout_norm=norms[0], demo_norm=norms[1],
            )  # fmt: skip

        if not grad:
            with torch.no_grad():
                return self.model(**inputs(batch), request=request)
        with torch.enable_grad() if sync else self.accelerator.no_sync(self.model):
            out = self.model(**inputs(batch), request=request)
            self.accelerator.backward(out.loss * mix.scale)
        return out

    @torch.no_grad()
    def _reference_logprobs(self, batch: Batch, demo: bool) -> Tensor:
        if demo:
            return torch.zeros(batch.targets.shape, device=batch.targets.device)
        request = lambda head: head.logprobs(batch.targets, self.temperature)[0]  # noqa: E731
        if self.reference is not None:
            return self.reference(**inputs(batch), request=request)
        with self.accelerator.unwrap_model(self.model).disable_adapter():
            return self.model(**inputs(batch), request=request)

    @torch.no_grad()
    def row_logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """The policy's log-probs of each row's response tokens, on the CPU, in order."""
        found: list[Tensor] = []
        for micro in self._schedule(rows):
            batch = collate(micro, self.pad_token, self.accelerator.device)
            request = lambda head, b=batch: head.logprobs(b.targets, self.temperature)[0]  # noqa: E731
            logps = self.model(**inputs(batch), request=request).cpu()
            found += [
                logps[b, max(r.start, 1) - 1 : len(r.ids) - 1].clone() for b, r in enumerate(micro)
            ]
        return found


def inputs(batch: Batch) -> dict[str, Tensor]:
    """What the model's own forward takes."""
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def over_ranks(accelerator: Accelerator, values: Sequence[float], how: str = "sum") -> list[float]:
    """Sum or maximum ("max") of each value over the ranks, in float64."""
    if accelerator.num_processes == 1:
        return [float(v) for v in values]
    mine = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    everyone = accelerator.gather(mine[None])
    return (everyone.amax(0) if how == "max" else everyone.sum(0)).tolist()
