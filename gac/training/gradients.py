"""Computes the gradient of a step: micro-batches, log-probs of other policies, loss, backward."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gac.control.term_pair import TermPair
from gac.data.micro import MicroBatches
from gac.data.rows import Batch, Row, collate, loss_divisors
from gac.methods.base import Loss, Mix
from gac.methods.token_loss import custom_loss
from gac.models.causal_lm import Head
from gac.parallel import collectives
from gac.parallel.setup import reshard, seed
from gac.rollouts.sampling import scatter_logps
from gac_kernels import DemoWeight, LossSpec, TokenMoments

from .gradient_parts import GradientParts
from .step import Measurements, Step
from .unit_sketches import UnitSketches


class Gradients:
    """Accumulates the gradient of a step's mixed loss into the model's parameters.

    Args:
        model: the prepared policy. reference: the frozen initial policy; None = the policy
            without its adapters.
        loss: the method's loss. temperature: of the rollouts; demonstrations are scored at 1.
        micro: how rows of one kind are grouped into micro-batches, packed or padded.
        kl_rows: number of this rank's rollouts used to estimate the KL when it is only monitored;
            None = all.
        averages: whether to maintain moving averages of the gradients, in `tracked`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        reference: nn.Module | None,
        loss: Loss,
        *,
        temperature: float,
        micro: MicroBatches,
        pad_token: int,
        averages: bool,
        kl_rows: int | None = None,
    ) -> None:
        self.accelerator, self.model, self.reference = accelerator, model, reference
        self.loss, self.spec, self.temperature = loss, loss.spec, temperature
        self.micro, self.pad_token = micro, pad_token
        self.kl_rows = None if self.spec.kl_coef else kl_rows
        self.tracked: dict[str, Tensor] = {}  # moving averages by part and parameter
        if averages:
            self.tracked = {
                f"{i}.{n}": torch.zeros_like(p.detach()) for i in (0, 1) for n, p in self._named()
            }

    def __call__(self, step: Step) -> Measurements:
        """Forward all rows, and backward those that can have a nonzero gradient."""
        seed(step.seed)  # dropout must not depend on how many random numbers sampling used
        even = Mix(0.5) if step.needs.parts else step.mix
        live, zero = self._split(step.rows, even)
        run = _Run(self, step)
        if step.needs.kl and self.kl_rows:
            run.sampled = self._sampled_reference(step)
        # rows without a gradient first: no forward may run between the last backward and the update
        run(zero, step.mix, grad=False)
        if step.needs.parts:
            return self._separate_gradients(run, live, step)
        run(live, step.mix)
        return run.measurements()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters under their unwrapped names, without DDP's prefix."""
        unwrapped = self.accelerator.unwrap_model(self.model)
        return [(n, p) for n, p in unwrapped.named_parameters() if p.requires_grad]

    def _separate_gradients(self, run: _Run, live: list[Row], step: Step) -> Measurements:
        """Compute a separate gradient for each part of each term, demonstrations first."""
        parts, live_rows, bias = GradientParts(self._named()), set(live), None
        needs, count = step.needs, step.needs.parts
        for demo in (True, False):
            rows = [r for r in step.rows if r.is_demo == demo]
            for i in range(count):
                block = rows[len(rows) * i // count : len(rows) * (i + 1) // count]
                # each part is a mean over its own rows, hence the scale `count`
                run([r for r in block if r in live_rows], Mix(float(demo), float(count)))
                parts.take()
        if needs.bias:
            plain = dataclasses.replace(
                self.spec, demo_weight=DemoWeight.ONE, clip_low=None, clip_high=None, dual_clip=None
            )
            for demo in (True, False):
                run([r for r in live if r.is_demo == demo], Mix(float(demo)), spec=plain)
                parts.take()
            bias = parts.bias_gram(count)
        gram = parts.gram()
        # a non-finite gradient would corrupt the moving averages permanently
        if needs.average and gram.isfinite().all():
            parts.average(self.tracked, needs.average)
            gram = parts.gram()
        return dataclasses.replace(run.measurements(), parts=parts, gram=gram, bias_gram=bias)

    def _split(self, rows: Sequence[Row], mix: Mix) -> tuple[list[Row], list[Row]]:
        """Rows that may have a gradient, and rows whose gradient is known to be zero."""
        if self.loss.token is not None:
            return list(rows), []
        # whether a term has a gradient even at zero advantage
        demo_always = self.spec.demo_weight is not DemoWeight.SHAPED
        rollout_always = self.spec.kl_coef != 0 or self.spec.entropy_coef != 0
        live: list[Row] = []
        zero: list[Row] = []
        for row in rows:
            if row.is_demo or row.mixed:
                has_gradient = mix.mu != 0 and (demo_always or row.advantage != 0)
            else:
                has_gradient = mix.mu != 1 and (rollout_always or row.advantage != 0)
            (live if has_gradient else zero).append(row)
        return live, zero

    def schedule(self, rows: Sequence[Row]) -> list[tuple[bool, list[Row]]]:
        """Split `rows` into micro-batches of one kind each, as (is_demo, rows).

        Every rank gets the same sequence of demonstration and rollout micro-batches, some of them
        empty, because each forward of the policy or the reference may be a collective.
        """
        micro: dict[bool, dict[tuple, list[list[Row]]]] = {False: {}, True: {}}
        of_kind: dict[tuple, list[Row]] = {}
        for row in rows:
            of_kind.setdefault(row.kind, []).append(row)
        for kind in sorted(of_kind):
            micro[kind[0]][kind] = self.micro.split(of_kind[kind])
        counts = collectives.largest([sum(map(len, kinds.values())) for kinds in micro.values()])
        micro_batches = []
        for (demo, kinds), count in zip(micro.items(), map(int, counts), strict=True):
            parts = [part for split in kinds.values() for part in split]
            if len(kinds) == 1 and len(parts) < count:
                # smaller micro-batches instead of empty ones
                parts = self.micro.split([r for r in rows if r.is_demo == demo], count)
            micro_batches += [(demo, parts[i] if i < len(parts) else []) for i in range(count)]
        return micro_batches

    @torch.no_grad()
    def losses(self, step: Step) -> TermPair:
        """The two loss terms of `step` under the current weights, without gradients."""
        kl = self.spec.kl_coef != 0  # skip the KL if it is only monitored
        needs = step.needs._replace(kl=kl, sketch=0)
        run = _Run(self, dataclasses.replace(step, needs=needs))
        run(step.rows, step.mix, grad=False)
        return run.measurements().losses

    def _sampled_reference(self, step: Step) -> dict[int, Tensor]:
        """Reference log-probs of `kl_rows` rollouts, by `Row.sequence`; the subset rotates."""
        rows = [r for r in step.rows if not r.is_demo and not r.mixed]
        count = min(self.kl_rows or 0, len(rows))
        chosen = [rows[(step.number + i * len(rows) // count) % len(rows)] for i in range(count)]
        with self.reference_model() as model:
            ref_logps = self.row_logprobs(chosen, model)
        return {r.sequence: logps for r, logps in zip(chosen, ref_logps, strict=True)}

    @torch.no_grad()
    def row_logprobs(self, rows: Sequence[Row], model: nn.Module | None = None) -> list[Tensor]:
        """Log-probs of each row's response tokens, in the order of `rows`, on the CPU.

        model: None = the policy.
        """
        model = self.model if model is None else model
        by_sequence: dict[int, Tensor] = {}
        for _, micro in self.schedule(rows):
            batch = self.collate(micro)
            request = self._logprob_request(batch)
            logps = model(**batch.model_inputs, request=request).cpu().flatten()
            # without rows, the batch still has one dummy row
            for start, r in zip(batch.starts, micro, strict=False):
                by_sequence[r.sequence] = logps[r.scored(start)].clone()
        reshard(model)
        return [by_sequence[r.sequence] for r in rows]

    def collate(self, rows: Sequence[Row]) -> Batch:
        """The tensors of one forward pass."""
        return collate(rows, self.pad_token, self.accelerator.device, self.micro.packed)

    @contextlib.contextmanager
    def reference_model(self):
        """Yield the frozen initial policy; with adapters, the policy with its adapters disabled."""
        if self.reference is not None:
            yield self.reference
        else:
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                yield self.model

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, demo: bool) -> Tensor:
        """Reference log-probs, shaped like the targets; zeros for demonstrations."""
        if demo:
            return torch.zeros(batch.targets.shape, device=batch.targets.device)
        with self.reference_model() as model:
            return model(**batch.model_inputs, request=self._logprob_request(batch))

    def _logprob_request(self, batch: Batch) -> Callable[[Head], Tensor]:
        """Request that returns the targets' log-probs from the head."""
        return lambda head: head.logprobs(batch.targets, self.temperature)[0]


class _Run:
    """The forward and backward passes of one step and their accumulated statistics."""

    def __init__(self, owner: Gradients, step: Step) -> None:
        self.owner, self.step = owner, step
        # gradients are averaged over ranks, so each rank divides by the global count / world size
        divisors = loss_divisors(step.counts, owner.spec, owner.loss.pooled)
        self.divisors = TermPair(*(n / owner.accelerator.num_processes for n in divisors))
        self.moments: list[TokenMoments] = []
        self.losses: list[Tensor] = []  # alternating: demo term, rollout term, ...
        self.sketches = UnitSketches(step.needs.sketch, step.sketch_seed)
        self.sampled: dict[int, Tensor] | None = None  # see `Gradients.kl_rows`
        # KL summed over the tokens in `sampled`, and their number
        self.kl = torch.zeros(2, dtype=torch.float64)

    def __call__(
        self, rows: Sequence[Row], mix: Mix, *, grad: bool = True, spec: LossSpec | None = None
    ) -> None:
        """Process `rows` in micro-batches.

        With an explicit `spec`, only the gradient is accumulated, no statistics.
        """
        micro_batches, used_spec = self.owner.schedule(rows), spec or self.owner.spec
        for i, (demo, micro) in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            batch = self.owner.collate(micro)
            out = self._run_micro_batch(batch, demo, micro, mix, grad, last, used_spec)
            if spec is None:
                self._accumulate_kl(batch, micro, out.logps)
                self.moments.append(out.moments)
                self.losses += out.demo_loss, out.rollout_loss
                self.sketches.add(micro, out.sketch)
        if not grad:  # only a backward reshards by itself
            reshard(self.owner.model)

    def measurements(self) -> Measurements:
        """The measurements, reduced over all ranks."""
        terms = torch.stack(self.losses or [torch.zeros(())] * 2).view(-1, 2)
        losses = TermPair(*collectives.mean(terms.double().sum(0).tolist()))
        kl = None
        if self.sampled is not None:
            total, tokens = collectives.total(self.kl.tolist())
            kl = total / tokens if tokens else math.nan
        parts = self.moments or [TokenMoments.zeros(self.owner.accelerator.device)]
        moments = TokenMoments.merged(parts).all_reduce()
        sketches = self.sketches.gathered() if self.step.needs.sketch else None
        return Measurements(losses, moments, sketches=sketches, kl=kl)

    def _accumulate_kl(self, batch: Batch, rows: list[Row], logps: Tensor) -> None:
        """Accumulate the k3 estimates of those `rows` that are in `sampled`."""
        # without rows, the batch still has one dummy row
        for start, row in zip(batch.starts, rows, strict=False):
            if self.sampled and not row.is_demo and row.sequence in self.sampled:
                gap = self.sampled[row.sequence] - logps.flatten()[row.scored(start)].cpu()
                self.kl += torch.tensor([(gap.double().exp() - gap - 1).sum(), len(gap)])

    def _run_micro_batch(
        self,
        batch: Batch,
        demo: bool,
        rows: list[Row],
        mix: Mix,
        grad: bool,
        sync: bool,
        spec: LossSpec,
    ) -> Any:
        """Forward one micro-batch, and backward it if `grad`.

        sync: reduce the gradients over ranks, in the last micro-batch.
        """
        owner = self.owner
        weight = rows[0].weight if rows else 1.0
        spec = dataclasses.replace(spec, temperature=1.0 if demo else owner.temperature)
        needs_ref = self.step.needs.kl and self.sampled is None
        ref = owner.reference_logprobs(batch, demo) if needs_ref else None
        old = None
        if self.step.old_logps and rows and not demo:
            old = scatter_logps([self.step.old_logps[r.sequence] for r in rows], rows, batch)
        # rows without a gradient are still sketched, with their own term at full weight
        mu = float(demo) if self.step.needs.sketch and not grad else mix.mu
        request = self._request(batch, mu, old, ref, spec, weight)
        model, accelerator = owner.model, owner.accelerator
        if not grad:
            with torch.no_grad():
                return model(**batch.model_inputs, request=request)
        with torch.enable_grad() if sync else accelerator.no_sync(model):
            out = model(**batch.model_inputs, request=request)
            accelerator.backward(out.loss * mix.scale)
        return out

    def _request(
        self,
        batch: Batch,
        mu: float,
        old: Tensor | None,
        ref: Tensor | None,
        spec: LossSpec,
        weight: float,
    ) -> Any:
        """Request that returns the loss of `batch`, times `weight`, from the head."""
        owner, divisors = self.owner, TermPair(*(n / weight for n in self.divisors))
        if (token := owner.loss.token) is not None:
            reference = None
            if owner.loss.reference:
                with torch.no_grad(), owner.reference_model() as model:
                    reference = model(**batch.model_inputs, request=lambda head: head.detached())
            inputs = reference, batch, mu, old, ref, spec, divisors
            return lambda head: custom_loss(token, head, *inputs)
        targets, old, ref = batch.to_loss_layout(batch.targets, old, ref)
        keywords: dict[str, Any] = {
            "mu": mu,
            "old_logps": old,
            "ref_logps": ref,
            "spec": spec,
            "rollout_norm": divisors.rollout,
            "demo_norm": divisors.demo,
            "cu_seqlens": batch.cu_seqlens,
        }
        one_sequence_per_row = len(batch.is_demo) == len(batch.starts)
        if self.sketches.sketch is not None and one_sequence_per_row:
            keywords["sketch"] = self.sketches.sketch
        tensors = targets, batch.advantages, batch.is_demo
        packed = batch.cu_seqlens is not None
        return lambda head: (head.packed() if packed else head).loss(*tensors, **keywords)
