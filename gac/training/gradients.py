"""The gradient of a step: forward passes in micro-batches, the loss, and what it measures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gac import collectives
from gac.data.micro_batches import MicroBatch, MicroBatches
from gac.errors import ConfigError
from gac.methods.base import Loss
from gac.models.head import Head, run_head
from gac.models.precision import patched_model
from gac.parallel.seeds import seed
from gac.parallel.sharding import reshard
from gac.rows import Batch, Row, engine_logps, loss_divisors, scatter_logps
from gac.types import Evidence, KLEstimate, Mix, TermPair
from gac_kernels import DemoWeight, LossOutput, LossSpec, TokenMoments
from gac_kernels.contract import IGNORE
from gac_kernels.tokens import BatchInputs, outside_trust_region, plan

from .probes import GradientParts
from .step import Measured, Step
from .token_loss import OtherLogps, custom_loss, with_k3

TOKEN_WEIGHTS = DemoWeight.P, DemoWeight.PHI  # of -log p
LOGPS = "old_logps", "ref_logps", "rollout_logps"  # of the fused loss


@dataclass(frozen=True)
class Forward:
    """The models of a run, and how their forward passes group rows."""

    accelerator: Accelerator
    model: nn.Module
    """The prepared policy."""
    reference: nn.Module | None
    """The frozen initial policy; None: the policy without its adapters."""
    temperature: float
    """Temperature of the rollouts; demonstrations are scored at 1."""
    micro: MicroBatches
    """How rows of one kind are grouped into micro-batches, packed or padded."""
    pad_token: int

    def batches(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        """The micro-batches of `rows`, on the device."""
        return self.micro.batches(rows, self.pad_token, self.accelerator.device)

    @torch.no_grad()
    def row_logprobs(self, rows: Sequence[Row], model: nn.Module | None = None) -> list[Tensor]:
        """Log-probs of each row's loss tokens, in the order of `rows`, on the CPU.

        model: None = the policy.
        """
        model = self.model if model is None else model
        by_sequence: dict[int, Tensor] = {}
        for micro, batch, _, _ in self.batches(rows):
            logps = self._logprobs(model, batch).cpu().flatten()
            # without rows, the batch still has one dummy row
            for start, row in zip(batch.starts, micro, strict=False):
                by_sequence[row.sequence] = logps[row.scored(start)].clone()
        reshard(model)
        return [by_sequence[row.sequence] for row in rows]

    @torch.no_grad()
    def top_logprobs(
        self, rows: Sequence[Row], model: nn.Module, k: int
    ) -> list[tuple[Tensor, Tensor]]:
        """The `k` most probable tokens at each row's loss tokens, in the order of `rows`.

        Returns: for each row, log-probs float32 [n, K] and ids int32 [n, K], on the CPU.
        """
        by_sequence: dict[int, tuple[Tensor, Tensor]] = {}
        vocabulary = patched_model(self.model).get_input_embeddings().weight.shape[0]
        for micro, batch, _, _ in self.batches(rows):
            every = torch.arange(batch.targets.numel())
            own = [every[row.scored(at)] for at, row in zip(batch.starts, micro, strict=False)]
            positions = torch.cat(own or [every[:0]]).to(batch.targets.device)
            head = run_head(model, **batch.model_inputs)
            logps, ids = head.top_logprobs(positions, k, self.temperature, vocabulary)
            sizes = [len(x) for x in own]
            parts = zip(logps.cpu().split(sizes), ids.int().cpu().split(sizes), strict=True)
            by_sequence |= {row.sequence: x for row, x in zip(micro, parts, strict=True)}
        reshard(model)
        return [by_sequence[row.sequence] for row in rows]

    @torch.no_grad()
    def hidden_states(
        self, rows: Sequence[Row], model: nn.Module
    ) -> tuple[list[Tensor], Head | None]:
        """The input [n, H] of the head at each row's loss tokens, on the CPU, and the head.

        The head has no hidden states, and is valid until the model is resharded or changed; None:
        no rank has rows.
        """
        by_sequence: dict[int, Tensor] = {}
        head = None
        for micro, batch, _, _ in self.batches(rows):
            head = run_head(model, **batch.model_inputs)
            assert head.hidden is not None
            hidden = head.hidden.flatten(0, 1)
            for start, row in zip(batch.starts, micro, strict=False):
                by_sequence[row.sequence] = hidden[row.scored(start)].cpu()
        own = [by_sequence[row.sequence] for row in rows]
        return own, None if head is None else replace(head, hidden=None)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters under their unwrapped names, without DDP's prefix."""
        unwrapped = self.accelerator.unwrap_model(self.model)
        return [(n, p) for n, p in unwrapped.named_parameters() if p.requires_grad]

    @contextlib.contextmanager
    def reference_model(self) -> Iterator[nn.Module]:
        """Yield the frozen initial policy; with adapters, the policy with its adapters disabled."""
        if self.reference is not None:
            yield self.reference
        else:
            # peft freezes disabled adapters: in their shards, which outlive gathered weights
            reshard(self.model)
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                yield self.model
                reshard(self.model)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, demo: bool) -> Tensor:
        """Reference log-probs, shaped like the targets; zeros for demonstrations."""
        if demo:
            return torch.zeros(batch.targets.shape, device=batch.targets.device)
        with self.reference_model() as model:
            return self._logprobs(model, batch)

    def _logprobs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Log-probs of the targets, of the same shape."""
        return run_head(model, **batch.model_inputs).logprobs(batch.targets, self.temperature)[0]

    @torch.no_grad()
    def reference_head(self, batch: Batch) -> Head:
        """The reference's last layer, valid until it is resharded."""
        with self.reference_model() as model:
            return run_head(model, **batch.model_inputs)


class SampledKL:
    """Mean k3 estimate over `count` of this rank's rollouts, selected by the step number."""

    def __init__(self, forward: Forward, step: Step, count: int) -> None:
        rows = [row for row in step.rows if not row.is_demo and not row.mixed]
        count = min(count, len(rows))
        chosen = [rows[(step.number + i * len(rows) // count) % len(rows)] for i in range(count)]
        with forward.reference_model() as model:
            logps = forward.row_logprobs(chosen, model)
        self.reference = {row.sequence: x for row, x in zip(chosen, logps, strict=True)}
        # of the rollouts' sums s and numbers of tokens n: s, n, s^2, s n, n^2 and 1
        self.sums = torch.zeros(6, dtype=torch.float64)

    def add(self, batch: Batch, rows: Sequence[Row], out: LossOutput) -> None:
        """Add those rows of a micro-batch that were selected in the constructor."""
        # without rows, the batch still has one dummy row
        for start, row in zip(batch.starts, rows, strict=False):
            if row.sequence in self.reference:
                logps = out.logps.flatten()[row.scored(start)].cpu()
                gap = (self.reference[row.sequence] - logps).double()
                s, n = float((gap.exp() - gap - 1).sum()), float(len(gap))
                self.sums += torch.tensor([s, n, s * s, s * n, n * n, 1.0], dtype=torch.float64)

    def estimate(self) -> KLEstimate:
        """The mean over all ranks, and its standard error: that of a ratio of sums over rollouts.

        Both are nan if there are no tokens.
        """
        s, n, ss, sn, nn, rows = collectives.total(self.sums.tolist())
        if not n:
            return KLEstimate(math.nan, math.nan)
        mean = s / n
        squares = max(ss - 2 * mean * sn + mean * mean * nn, 0.0)
        error = math.sqrt(squares * rows / (rows - 1)) / n if rows > 1 else math.nan
        return KLEstimate(mean, error)


class Totals:
    """The losses and the token statistics of a step's micro-batches.

    old_logps: `Step.old_logps`, at which the loss compares the policy with the engine.
    """

    def __init__(self, loss: Loss, old_logps: Sequence[Tensor] = ()) -> None:
        self.spec, self.old_logps = loss.spec, old_logps
        self.weighted = loss.token is None and loss.spec.demo_weight in TOKEN_WEIGHTS
        self.weights: list[Tensor] = []  # float64 [2]: sum and number of the demonstrations' tokens
        self.terms: list[Tensor] = []  # [demo loss, rollout loss, teacher's or 0, whether it is]
        self.parts: list[TokenMoments] = []
        self.rows: list[Sequence[Row]] = []  # of each part
        self.sums: collectives.Sums = {}  # of the engine's log-probs

    def add(self, batch: Batch, rows: Sequence[Row], out: LossOutput) -> None:
        """Add a micro-batch."""
        assert out.moments is not None
        self.rows.append(rows)
        taught, zero = out.teacher_loss is not None, torch.zeros_like(out.demo_loss)
        teacher = [zero if out.teacher_loss is None else out.teacher_loss, zero + taught]
        self.terms.append(torch.stack([out.demo_loss, out.rollout_loss, *teacher]))
        self.parts.append(out.moments)
        if self.weighted and rows and rows[0].is_demo:
            p = out.logps.detach()[batch.targets.reshape(out.logps.shape) >= 0].double().exp()
            w = p if self.spec.demo_weight is DemoWeight.P else p * (1 - p)
            self.weights.append(torch.stack([w.sum(), w.new_tensor(w.numel())]))
        if any(row.engine_logps for row in rows):
            old = [self.old_logps[row.sequence] for row in rows] if self.old_logps else None
            logps = out.logps if old is None else scatter_logps(old, rows, batch)
            pair = torch.stack([logps, engine_logps(rows, batch)]).flatten(1).double().cpu()
            for start, row in zip(batch.starts, rows, strict=False):
                scored = pair[:, row.scored(start)]
                scored = scored[:, (scored[0] - scored[1]).isfinite()]
                if scored.numel():
                    found = mismatch(*scored, advantage=row.advantage, spec=self.spec)
                    collectives.add_sums(self.sums, found)

    def reduced(self) -> tuple[TermPair, float | None, float | None]:
        """Over all ranks: both terms, and if any, the teacher's and the mean token weight."""
        own: list[float] = []
        for sums, size in ((self.terms, 4), (self.weights, 2)):
            own += torch.stack(sums or [torch.zeros(size)]).double().sum(0).tolist()
        demo, rollout, teacher, taught, weight, tokens = collectives.mean(own)
        terms = TermPair(demo, rollout), teacher if taught else None
        return *terms, weight / tokens if tokens else None

    def moments(self, device: torch.device) -> TokenMoments:
        """The statistics of all ranks; a rank without rows contributes zeros on `device`."""
        return TokenMoments.merged(self.parts or [TokenMoments.zeros(device)]).all_reduce()

    def sources(self) -> tuple[str, ...]:
        """The source of each entry of `moments().demo_nll`. All ranks must call this method."""
        own: list[str] = []
        for rows, part in zip(self.rows, self.parts, strict=True):
            count = part.demo_nll.numel()  # one or two sequences per row; one without rows
            own += [rows[i * len(rows) // count].source if rows else "" for i in range(count)]
        ranks = collectives.gather(own)
        longest = max(map(len, ranks))  # as `all_reduce` pads them
        return tuple(source for names in ranks for source in names + [""] * (longest - len(names)))


def mismatch(
    logps: Tensor, engine: Tensor, *, advantage: float, spec: LossSpec
) -> collectives.Sums:
    """Columns on the log-probs of a row's tokens under the policy and under the engine, [T]."""
    gap = logps - engine
    kl = (gap.exp() - gap - 1).sum()  # the engine sampled, so this is KL(engine || policy)
    sums: collectives.Sums = {
        "sampling/mismatch_kl": (kl.item(), len(gap)),
        "sampling/sampling_logp_difference/max": (gap.abs().max().item(), collectives.MAXIMUM),
    }
    if spec.masks_probabilities:
        outside = outside_trust_region(logps, engine, advantage, spec)
        sums["sampling/frac_corrected"] = (int(outside.sum()), len(gap))
    elif spec.correction != "none":
        log_factor = gap.sum() if spec.correction.startswith("sequence") else gap
        factor = log_factor.exp().expand_as(gap)
        kept = factor.clamp(spec.correction_min or 0.0, spec.correction_max) == factor
        sums["sampling/frac_corrected"] = (int((~kept).sum()), len(gap))
    return sums


Probe = Totals | SampledKL  # each adds the output of every micro-batch


class Gradients:
    """Accumulates the gradient of a step's mixed loss into the model's parameters.

    Args:
        forward: the policy and the reference.
        loss: the method's loss.
        kl_sample_size: number of this rank's rollouts used to estimate the KL when it is only
            monitored; None = all.
        averages: whether to maintain moving averages of the gradients, in `tracked`.
    """

    def __init__(
        self,
        forward: Forward,
        loss: Loss,
        kl_sample_size: int | None = None,
        averages: bool = False,
    ) -> None:
        self.forward, self.loss = forward, loss
        self.accelerator, self.model = forward.accelerator, forward.model
        self.kl_sample_size = kl_sample_size
        terms, named = (0, 1) if averages else (), self.forward.trainable()
        self.tracked = {f"{i}.{n}": torch.zeros_like(p.detach()) for i in terms for n, p in named}

    def __call__(self, step: Step) -> Measured:
        """Run the forward of all rows, and the backward of those that may have a gradient."""
        seed(step.seed)  # dropout must not depend on how many random numbers sampling used
        needs, totals = step.needs, Totals(self.loss, step.old_logps)
        kl = (
            SampledKL(self.forward, step, self.kl_sample_size)
            if needs.kl and self.kl_sample_size
            else None
        )
        probes: list[Probe] = [totals] if kl is None else [totals, kl]
        accumulate = partial(self._accumulate, step, probes)
        mu = 0.5 if needs.parts else step.mix.mu
        taught = self._teacher_coef(step) != 0
        live = [row for row in step.rows if self._has_gradient(row, mu, taught)]
        zero = [row for row in step.rows if not self._has_gradient(row, mu, taught)]
        # rows without a gradient first: no forward may run between the last backward and the update
        accumulate(zero, step.mix, grad=False)
        parts = gram = bias_gram = None
        if needs.parts:
            parts = GradientParts(self.forward.trainable(), needs)
            gram, bias_gram = parts.measure(step.rows, live, accumulate, self.tracked)
        else:
            accumulate(live, step.mix)
        moments, evidence = totals.moments(self.accelerator.device), None
        losses, teacher_loss, demo_weight = totals.reduced()
        if needs.signals:
            evidence = Evidence(
                step=step.number,
                moments=moments,
                gram=gram,
                sft_count=needs.parts,
                bias_gram=bias_gram,
            )
        return Measured(
            losses=losses,
            moments=moments,
            kl=None if kl is None else kl.estimate(),
            parts=parts,
            gram=gram,
            evidence=evidence,
            sources=totals.sources() if needs.sources else None,
            means=totals.sums,
            demo_weight=demo_weight,
            teacher_loss=teacher_loss,
        )

    def losses(self, step: Step) -> TermPair:
        """The two loss terms of `step` under the current weights, without gradients."""
        # without a KL that is only monitored
        needs = step.needs._replace(kl=self.loss.spec.kl_coef != 0)
        step, totals = replace(step, needs=needs), Totals(self.loss)
        self._accumulate(step, [totals], step.rows, step.mix, grad=False)
        return totals.reduced()[0]

    def _accumulate(
        self,
        step: Step,
        probes: Sequence[Probe],
        rows: Sequence[Row],
        mix: Mix,
        plain: bool = False,
        *,
        grad: bool = True,
    ) -> None:
        """One pass over `rows` in micro-batches: forward and, if `grad`, backward.

        plain: only add the gradient without phi and without clipping; nothing is measured.
        """
        # the mix scales the whole loss, but not the weight of the teacher's
        teacher_coef = self._teacher_coef(step) / mix.scale if mix.scale else 0.0
        spec = replace(self.loss.spec, teacher_coef=teacher_coef)
        if plain:
            spec = replace(
                spec, demo_weight=DemoWeight.ONE, clip_low=None, clip_high=None, dual_clip=None
            )
        batches = self.forward.batches(rows)
        # gradients are averaged over ranks, so each rank divides by the global count / world size
        divisors = loss_divisors(step.counts, spec, self.loss.pooled)
        norms = TermPair(*(n / self.accelerator.num_processes for n in divisors))
        for micro, batch, demo, last in batches:
            # the last backward reduces the gradients over ranks
            sync = nullcontext() if last else self.accelerator.no_sync(self.model)
            with torch.set_grad_enabled(grad), sync:
                out = self._loss(step, batch, micro, demo=demo, mu=mix.mu, spec=spec, norms=norms)
                if grad:
                    self.accelerator.backward(out.loss * mix.scale)
            for probe in () if plain else probes:
                probe.add(batch, micro, out)
        if not grad:  # only a backward reshards by itself
            reshard(self.model)
        elif isinstance(self.model, DistributedDataParallel):
            trained = self.forward.trainable()
            unused = [name for name, p in trained if p.grad is None]
            if 0 < len(unused) < len(trained):
                raise ConfigError(
                    f"parallel.mode='ddp': {len(unused)} weights, such as {unused[0]}, have no "
                    "gradient, so the others are not reduced: use parallel.mode=fsdp"
                )
        if self.forward.reference is not None:
            reshard(self.forward.reference)

    def _teacher_coef(self, step: Step) -> float:
        """The weight of the teacher's loss in `step`; 0 if no teacher has scored its rollouts."""
        own = self.loss.spec.teacher_coef if step.mix.teacher is None else step.mix.teacher
        scored = step.teacher_logps or step.teacher_hidden
        return own if scored and self.loss.token is None else 0.0

    def _has_gradient(self, row: Row, mu: float, taught: bool) -> bool:
        """Whether the gradient of `row` may be nonzero if demonstrations have the weight `mu`.

        taught: whether rollouts also have the loss of a teacher.
        """
        if self.loss.token is not None:
            return True
        spec, advantage = self.loss.spec, row.advantage != 0
        demo = mu != 0 and (advantage or spec.demo_weight is not DemoWeight.SHAPED)
        rollout = mu != 1 and (advantage or spec.kl_coef != 0 or spec.entropy_coef != 0)
        rollout |= taught
        return (demo and (row.is_demo or row.mixed)) or (rollout and not row.is_demo)

    def _loss(
        self,
        step: Step,
        batch: Batch,
        rows: list[Row],
        demo: bool,
        mu: float,
        spec: LossSpec,
        norms: TermPair,
    ) -> LossOutput:
        """The weighted loss of micro-batch `rows`, whose tensors are `batch`."""
        norms = TermPair(*(n / rows[0].weight for n in norms)) if rows else norms
        coef = spec.teacher_coef
        spec = replace(spec, temperature=1.0 if demo else self.forward.temperature)
        measures_kl = step.needs.kl and not self.kl_sample_size
        ref = self.forward.reference_logprobs(batch, demo) if measures_kl else None
        old, sampled = None, bool(rows) and not demo
        if step.old_logps and sampled:
            old = scatter_logps([step.old_logps[r.sequence] for r in rows], rows, batch)
        teacher = _teacher_inputs(step, rows, batch) if sampled else {}
        engine = None if spec.correction == "none" else engine_logps(rows, batch)
        reference = self.forward.reference_head(batch) if self.loss.reference else None
        head = run_head(self.model, **batch.model_inputs)
        if self.loss.token is not None:
            out = custom_loss(
                self.loss.token,
                head,
                batch,
                mu=mu,
                spec=spec,
                norms=norms,
                logps=OtherLogps(
                    old=old, reference=ref, teacher=teacher.get("teacher_logps"), engine=engine
                ),
                reference=reference,
                per_token=self.loss.per_token,
                policy=self.loss.policy,
            )
        else:
            # the sequences of packed or mixed rows are not the rows of a table
            shape = batch.targets.shape if batch.cu_seqlens is None else (-1,)
            logps = zip(LOGPS, (old, ref, engine), strict=True)
            keywords: dict[str, Any] = {k: x.reshape(shape) for k, x in logps if x is not None}
            if teacher and not teacher["teacher_logps"].isnan().all():
                keywords |= {k: x.reshape(*shape, *x.shape[2:]) for k, x in teacher.items()}
            else:  # no teacher has scored these rows, which are alike in this (`Row.kind`)
                spec = replace(spec, teacher_coef=0.0)
            out = head.loss(
                batch.targets.reshape(shape),
                batch.advantages,
                batch.is_demo,
                mu=mu,
                spec=spec,
                rollout_norm=norms.rollout,
                demo_norm=norms.demo,
                cu_seqlens=batch.cu_seqlens,
                **keywords,
            )
        if step.teacher_hidden and sampled and self.loss.token is None:
            out = self._with_divergence(out, head, step, batch, rows, coef=coef, norms=norms)
        return out if ref is None or spec.kl_estimator == "k3" else with_k3(out, batch, ref)

    def _with_divergence(
        self,
        out: LossOutput,
        head: Head,
        step: Step,
        batch: Batch,
        rows: list[Row],
        *,
        coef: float,
        norms: TermPair,
    ) -> LossOutput:
        """Add the divergence from the teacher's whole distributions to the loss of rollouts."""
        own = [step.teacher_hidden[row.sequence] for row in rows]
        if own[0].isnan().all():  # no teacher has scored these rows, which are alike in this
            return out
        spec = replace(self.loss.spec, temperature=self.forward.temperature)
        shape = batch.targets.shape if batch.cu_seqlens is None else (-1,)
        inputs = BatchInputs(
            targets=batch.targets.reshape(shape),
            advantages=batch.advantages,
            is_demo=batch.is_demo,
            mu=0.0,
            cu_seqlens=batch.cu_seqlens,
            rollout_norm=norms.rollout,
            demo_norm=norms.demo,
        )
        tokens = plan(inputs, spec)
        rollout = (tokens.live & ~tokens.demo).view_as(batch.targets)
        weight, bias, scale, softcap = step.teacher_head
        taught = head.divergence(
            torch.where(rollout, batch.targets, IGNORE),
            Head(scatter_logps(own, rows, batch), weight, bias, scaling=(scale, softcap)),
            spec.teacher_loss,
            token_weights=tokens.weight.view_as(batch.targets),
            temperature=spec.temperature,
        )
        loss = out.loss + coef * taught.loss
        return out._replace(loss=loss, teacher_loss=taught.loss.detach())


def _teacher_inputs(step: Step, rows: Sequence[Row], batch: Batch) -> dict[str, Tensor]:
    """The teacher's log-probs [B, T] or [B, T, K] of rollouts, and the K ids, as loss arguments.

    {}: the run has no teacher. nan: no teacher has scored the token.
    """
    named = {
        "teacher_logps": (step.teacher_logps, math.nan),
        "teacher_ids": (step.teacher_ids, IGNORE),
    }
    return {
        name: scatter_logps([values[row.sequence] for row in rows], rows, batch, other)
        for name, (values, other) in named.items()
        if values
    }
