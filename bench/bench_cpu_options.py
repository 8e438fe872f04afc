"""Time of each loss option on the CPU in float32, relative to the plain loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gac_kernels import LossSpec, fused_gac_loss, fused_linear_gac_loss, linear_token_logprobs

from .batches import LENGTH, Head, linear_batch
from .record import Record
from .settings import tiny
from .timing import Step, interleave

CPU = torch.device("cpu")
N, HEAD = tiny(512, 2 * LENGTH), tiny(Head(256, 32000), Head(16, 300))
SECONDS = tiny(60, 0)  # per form, over all rounds
ONE_PASS_TARGET = 1.05  # for options that need only per-token numbers


class Option(NamedTuple):
    """A loss option.

    A step of the linear loss takes 6 N H V FLOPs with one pass over the logits, 8 N H V with two.
    """

    spec: LossSpec = LossSpec()
    columns: tuple[str, ...] = ()
    other: dict[str, Any] = {}  # noqa: RUF012 - never changed
    passes: int = 1


OPTIONS = {
    "plain": Option(),
    "role per token": Option(columns=("is_demo",)),
    "weights": Option(columns=("weights",)),
    "token correction": Option(LossSpec(correction="token_mask"), ("rollout_logps",)),
    "sequence correction": Option(
        LossSpec(correction="sequence_mask"), ("rollout_logps", "old_logps")
    ),
    "CISPO": Option(LossSpec(policy_loss="cispo"), ("old_logps",)),
    "SAPO": Option(LossSpec(policy_loss="sapo"), ("old_logps",)),
    "REINFORCE": Option(LossSpec(policy_loss="reinforce")),
    "unbiased KL": Option(
        LossSpec(kl_coef=0.1, use_bias_correction_kl=True), ("ref_logps", "old_logps")
    ),
    "GSPO on-policy": Option(LossSpec(importance_sampling_level="sequence")),
    "logit scale": Option(other={"logit_scale": 0.5}),
    "softcap": Option(other={"softcap": 30.0}),
    "GSPO": Option(LossSpec(importance_sampling_level="sequence"), ("old_logps",), passes=2),
    "sequence correction of current log-probs": Option(
        LossSpec(correction="sequence_mask", correction_max=None), ("rollout_logps",), passes=2
    ),
}


def make_steps() -> dict[str, dict[str, Step]]:
    """Make a step (forward and backward) of each option, for the linear and the logits-level loss.

    Every row has a gradient.
    """
    batch = linear_batch(N, HEAD, torch.float32, CPU)
    hidden, weight, targets = batch.hidden.detach(), batch.weight.detach(), batch.targets
    logps, _ = linear_token_logprobs(hidden, weight, targets)
    columns = {
        "is_demo": batch.is_demo[:, None].expand_as(targets),
        "weights": torch.rand(targets.shape) + 0.5,
        **dict.fromkeys(("old_logps", "ref_logps", "rollout_logps"), logps - 0.01),
    }
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (hidden @ weight.T).requires_grad_()

    def step(form: str, option: Option) -> Step:
        keywords = {"is_demo": batch.is_demo, "spec": option.spec, "mu": 0.5, **option.other}
        keywords |= {name: columns[name] for name in option.columns}

        def run() -> object:
            if form == "logits":
                out = fused_gac_loss(logits, targets, batch.advantages, **keywords)
                return torch.autograd.grad(out.loss, logits)
            out = fused_linear_gac_loss(*leaves, targets, batch.advantages, **keywords)
            return torch.autograd.grad(out.loss, leaves)

        return run

    return {
        form: {name: step(form, option) for name, option in OPTIONS.items()}
        for form in ("linear", "logits")
    }


def test_cpu_options(record: Record) -> None:
    shape = f"H={HEAD.hidden} V={HEAD.vocab} float32"
    for form, steps in make_steps().items():
        timings = interleave(steps, CPU, SECONDS)
        plain = timings["plain"].best
        print(f"\n{form}: {N} tokens, {shape}, {torch.get_num_threads()} threads")
        for name, timing in timings.items():
            option, ratio = OPTIONS[name], timing.best / plain
            one_pass = option.passes == 1 and "softcap" not in option.other
            slow = one_pass and ratio > ONE_PASS_TARGET
            note = f"above {ONE_PASS_TARGET}" if slow else ""
            print(f"{name:42} {timing.best:8.1f} ms   {ratio:5.3f}  {note}")
            record.add(
                device="cpu",
                work=f"options {form}",
                shape=shape,
                tokens=N,
                case=name,
                provider="ours",
                ms=timing.best,
                median_ms=timing.median,
                rounds=timing.rounds,
                relative=ratio,
                passes=option.passes,
            )
