"""From rows to gradients: micro-batches, log-probs of other policies, the loss, backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gac.data.rows import Batch, Row, collate, split
from gac.methods import Method, Mix
from gac.model import Head
from gac.parallel.setup import reshard
from gac.rollouts.sampling import place
from gac_kernels import DemoWeight, LossSpec, TokenMoments

from .gradient_parts import GradientParts
from .token_loss import own_loss

Norms = tuple[float, float]


class Measured(NamedTuple):
    """What one step's forward passes found, on this rank."""

    moments: TokenMoments
    rollout_loss: Tensor  # 0-d: this rank's share, so that the mean over ranks is the term
    demo_loss: Tensor  # 0-d
    parts: GradientParts | None = None  # the separate gradients, still to be combined
    bias_gram: Tensor | None = None  # [4, 4] of SFT, RL, and both without phi and clip


class Gradients:
    """Accumulates the gradient of the mixed loss into the model's parameters.

    Args:
        model: the prepared policy. reference: the frozen initial policy; None = the policy
            without its adapters.
        method: what it says about the loss. spec: its loss, from the run's settings.
        temperature: of the rollouts; demonstrations are scored at 1.
        micro_batch: rows per forward; None = all rows of a kind.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        reference: nn.Module | None,
        method: Method,
        spec: LossSpec,
        *,
        temperature: float,
        micro_batch: int | None,
        pad_token: int,
    ) -> None:
        self.accelerator, self.model, self.reference = accelerator, model, reference
        self.method, self.spec, self.temperature = method, spec, temperature
        self.micro_batch, self.pad_token = micro_batch, pad_token
        self.tracked: dict[str, Tensor] = {}  # moving averages by part and parameter
        if method.tracking:
            self.tracked = {
                f"{i}.{n}": torch.zeros_like(p.detach()) for i in (0, 1) for n, p in self._named()
            }

    def __call__(
        self,
        rows: Sequence[Row],
        mix: Mix,
        norms: Norms,
        *,
        kl: bool,
        old_logps: Sequence[Tensor] = (),
        step: int | None = None,
    ) -> Measured:
        """Forward all rows, backward those that can move a weight.

        norms: global denominators of the rollout and the demonstration term, divided by the
            number of ranks, because gradients are averaged over ranks.
        kl: also measure the KL to the reference policy.
        old_logps: log-probs of the sampling policy by `Row.sequence`; empty = on-policy.
        step: asks the method whether the gradients are to be kept apart; None = they are not.
        """
        count = 0 if step is None else self.method.parts(step)
        even = Mix(0.5) if count else mix
        live = [r for r in rows if not self._silent(r, even)]
        dead = [r for r in rows if self._silent(r, even)]
        run = _Run(self, norms, kl, old_logps)
        # those without gradient first: no forward may run between the last backward and the update
        run(dead, mix, grad=False)
        if step is None or not count:
            run(live, mix)
            return run.measured()
        return self._apart(run, live, rows, count, step)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, under the names of one process: DDP puts another before each."""
        whole = self.accelerator.unwrap_model(self.model)
        return [(n, p) for n, p in whole.named_parameters() if p.requires_grad]

    def _apart(
        self, run: _Run, live: list[Row], rows: Sequence[Row], count: int, step: int
    ) -> Measured:
        """One backward for each of `count` parts of each term, demonstrations first."""
        parts, keep, bias = GradientParts(self._named()), set(live), None
        for demo in (True, False):
            mine = [r for r in rows if r.is_demo == demo]
            for i in range(count):
                block = mine[len(mine) * i // count : len(mine) * (i + 1) // count]
                # a part is a mean of its own, so it is `count` times its share of the whole
                run([r for r in block if r in keep], Mix(float(demo), float(count)))
                parts.take()
        if self.method.measures_bias:
            plain = dataclasses.replace(
                self.spec, demo_weight=DemoWeight.ONE, clip_low=None, clip_high=None, dual_clip=None
            )
            for demo in (True, False):
                run([r for r in live if r.is_demo == demo], Mix(float(demo)), spec=plain)
                parts.take()
            bias = parts.bias_gram(count)
        # a broken gradient would stay in the averages for ever; the step is skipped instead
        if self.method.tracking and parts.gram().isfinite().all():
            parts.average(self.tracked, self.method.track(step))
        return run.measured()._replace(parts=parts, bias_gram=bias)

    def _silent(self, row: Row, mix: Mix) -> bool:
        """Whether the row's gradient is known to be zero, so that it costs no backward."""
        if self.method.own_loss:
            return False
        if row.is_demo or row.demo_tokens:
            unread = self.spec.demo_weight is not DemoWeight.SHAPED or row.advantage != 0
            return mix.mu == 0 or not unread
        still = row.advantage == 0 and self.spec.kl_coef == 0 and self.spec.entropy_coef == 0
        return mix.mu == 1 or still

    def schedule(self, rows: Sequence[Row]) -> list[tuple[bool, list[Row]]]:
        """Micro-batches of one kind each, and whether they are demonstrations.

        Every rank gets the same number of both sorts in the same order, some of them empty,
        because each forward of the policy or of the reference may be a collective.
        """
        unit = 2 if self.method.pairs else 1
        micro: dict[bool, list[list[Row]]] = {False: [], True: []}
        for kind in sorted({r.kind for r in rows}):
            alike = [r for r in rows if r.kind == kind]
            micro[kind[0]] += map(list, split(alike, self.micro_batch, unit))
        most = over_ranks(self.accelerator, [len(parts) for parts in micro.values()], "max")
        return [
            (demo, parts[i] if i < len(parts) else [])
            for (demo, parts), count in zip(micro.items(), most, strict=True)
            for i in range(int(count))
        ]

    @torch.no_grad()
    def losses(
        self, rows: Sequence[Row], mix: Mix, norms: Norms, old_logps: Sequence[Tensor]
    ) -> Measured:
        """Both terms under the present weights, without a gradient; arguments as in a call."""
        run = _Run(self, norms, self.spec.kl_coef != 0, old_logps)
        run(rows, mix, grad=False)
        return run.measured()

    @torch.no_grad()
    def row_logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """The policy's log-probs of each row's response tokens, on the CPU, by `Row.sequence`."""
        found: dict[int, Tensor] = {}
        for _, micro in self.schedule(rows):
            batch = collate(micro, self.pad_token, self.accelerator.device)
            logps = self.model(**inputs(batch), request=self._scores(batch)).cpu()
            for b, r in enumerate(micro):
                found[r.sequence] = logps[b, max(r.start, 1) - 1 : len(r.ids) - 1].clone()
        reshard(self.model)
        return [found[r.sequence] for r in rows]

    @contextlib.contextmanager
    def reference_model(self):
        """The frozen initial policy; with adapters, the policy without them."""
        if self.reference is not None:
            yield self.reference
        else:
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                yield self.model

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, demo: bool) -> Tensor:
        """[B, T] log-probs under the reference; 0 for demonstrations, where nothing reads them."""
        if demo:
            return torch.zeros(batch.targets.shape, device=batch.targets.device)
        with self.reference_model() as model:
            return model(**inputs(batch), request=self._scores(batch))

    def _scores(self, batch: Batch) -> Callable[[Head], Tensor]:
        """What is asked of the model's last layer for the targets' log-probs."""
        return lambda head: head.logprobs(batch.targets, self.temperature)[0]


class _Run:
    """The forward and backward passes of one step, and the sums of what they find."""

    def __init__(
        self, owner: Gradients, norms: Norms, kl: bool, old_logps: Sequence[Tensor]
    ) -> None:
        self.owner, self.norms, self.kl, self.old_logps = owner, norms, kl, old_logps
        self.moments = TokenMoments.zeros(owner.accelerator.device)
        self.losses = torch.zeros(2, device=owner.accelerator.device)

    def __call__(
        self, rows: Sequence[Row], mix: Mix, *, grad: bool = True, spec: LossSpec | None = None
    ) -> None:
        """Micro-batches of `rows`; under a `spec` that is not the method's, only gradients."""
        micro_batches = self.owner.schedule(rows)
        for i, (demo, micro) in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            out = self._one(demo, micro, mix, grad, last, spec or self.owner.spec)
            if spec is None:
                self.moments = self.moments + out.moments
                self.losses += torch.stack([out.rollout_loss, out.demo_loss])
        if not grad:  # no backward will do it
            reshard(self.owner.model)

    def measured(self) -> Measured:
        return Measured(self.moments, self.losses[0], self.losses[1])

    def _one(
        self, demo: bool, rows: list[Row], mix: Mix, grad: bool, sync: bool, spec: LossSpec
    ) -> Any:
        owner, device = self.owner, self.owner.accelerator.device
        batch = collate(rows, owner.pad_token, device)
        weight = rows[0].weight if rows else 1.0
        spec = dataclasses.replace(spec, temperature=1.0 if demo else owner.temperature)
        ref = owner.reference_logprobs(batch, demo) if self.kl else None
        old = None
        if self.old_logps and rows and not demo:
            old = place([self.old_logps[r.sequence] for r in rows], rows, batch.targets)
        request = self._request(batch, mix.mu, old, ref, spec, weight)
        model, accelerator = owner.model, owner.accelerator
        if not grad:
            with torch.no_grad():
                return model(**inputs(batch), request=request)
        with torch.enable_grad() if sync else accelerator.no_sync(model):
            out = model(**inputs(batch), request=request)
            accelerator.backward(out.loss * mix.scale)
        return out

    def _request(
        self, batch: Batch, mu: float, old: Tensor | None, ref: Tensor | None, spec: LossSpec,
        weight: float,
    ) -> Any:  # fmt: skip
        """What is asked of the model's last layer: the loss of `batch`, times `weight`."""
        norms, owner = (self.norms[0] / weight, self.norms[1] / weight), self.owner
        if owner.method.own_loss:
            reference = None
            if owner.method.uses_reference:
                with torch.no_grad(), owner.reference_model() as model:
                    reference = model(**inputs(batch), request=lambda head: head.detached())
            return lambda head: own_loss(
                owner.method.token_loss, head, reference, batch, mu, old, ref, spec, norms
            )
        pack = (lambda x: None if x is None else x.flatten()) if _mixed(batch) else (lambda x: x)
        keywords: dict[str, Any] = {
            "mu": mu, "old_logps": pack(old), "ref_logps": pack(ref), "spec": spec,
            "rollout_norm": norms[0], "demo_norm": norms[1],
        }  # fmt: skip
        if _mixed(batch):
            keywords["cu_seqlens"] = batch.cu_seqlens
            return lambda head: head.packed().loss(
                pack(batch.targets), batch.advantages, batch.is_demo, **keywords
            )
        return lambda head: head.loss(batch.targets, batch.advantages, batch.is_demo, **keywords)


def _mixed(batch: Batch) -> bool:
    return batch.cu_seqlens is not None


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
