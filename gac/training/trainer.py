"""The training loop: sample, score, one fused loss, one optimiser step, one line in the record.

Everything random in step t is drawn from (seed, t, rank), so a resumed run repeats a run that was
never stopped. The trainer never names a method; see `methods/base.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from gac.config import dump, save
from gac.control.signals import Evidence
from gac.data import load_prompts
from gac.data.feed import Feed
from gac.data.rows import Row, denominators, norms
from gac.evaluate import evaluate
from gac.export import export_checkpoint
from gac.faults import checkpoint, guard, replay
from gac.faults.guard import Guard, RunError
from gac.faults.heartbeat import Heartbeat
from gac.faults.stopping import StopRequest
from gac.methods import Mix, Observation
from gac.model import load_model, load_tokenizer, stop_tokens
from gac.parallel import setup
from gac.rewards import Tally, build_reward, in_use
from gac.rollouts.sampling import Rollouts, Sampler
from gac.train_config import TrainConfig, restated

from .gradients import Gradients, Measured, over_ranks
from .optim import learning_rate, make_optimizer, set_learning_rate, trainable
from .record import Record

logger = logging.getLogger(__name__)


def train(config: TrainConfig, resume: bool = True) -> Path:
    """Run the training that `config` describes, from its last checkpoint if it has one.

    Returns the run directory. Raises KeyboardInterrupt after saving when it is interrupted.
    """
    try:
        return Trainer(config, resume).run()
    finally:
        setup.leave()


class Trainer:
    """One run. State between steps: step, method state, last observation, data positions."""

    def __init__(self, config: TrainConfig, resume: bool = True) -> None:
        self.config, self.method = config, config.method
        self.out = Path(config.out)
        self.accelerator = setup.make_accelerator(
            config.parallel, config.mixed_precision, config.trackers, config.out
        )
        self.heartbeat = Heartbeat()
        found = self._open_folder(resume)
        self.tokenizer = load_tokenizer(config.model)
        stop_tokens(self.tokenizer, (*config.rollouts.stop, *config.eval.stop))  # refused early
        longest = config.loss.max_tokens or config.rollouts.max_new_tokens
        self.spec = self.method.spec(dataclasses.replace(config.loss, max_tokens=longest))
        ranks = self.accelerator.num_processes
        self.feed = Feed(config, self.tokenizer, self.accelerator.process_index, ranks)
        self.eval_examples = (
            load_prompts(config.eval.data, self.tokenizer) if config.eval.data.prompts else []
        )
        self.needs_kl = self.spec.kl_coef != 0
        self.model = self._prepare(setup.prepare)
        self.reference = self._make_reference()
        self.optimizer = make_optimizer(self.model, config.optim)
        reward = build_reward(config.reward)
        self.sampler = Sampler(config.rollouts, self.tokenizer, reward, self.method)
        self.rollouts: Rollouts | None = None
        self.tally = Tally(reward)
        self.gradients = Gradients(
            self.accelerator, self.model, self.reference, self.method, self.spec,
            temperature=config.rollouts.temperature, micro_batch=config.micro_batch,
            pad_token=self.tokenizer.pad_token_id,
        )  # fmt: skip
        self.step, self.state, self.seen = 0, self.method.init(), Observation(0)
        self.guard, self.stop = Guard(config.guards), StopRequest()
        self.best: dict[str, Any] = {}  # step and accuracy of the best checkpoint
        self.kept: Path | None = None  # the first of the last skipped steps in a row
        self._start_from(found)

    # ---- set-up

    def _prepare(self, how: Any) -> torch.nn.Module:
        config = self.config
        model = load_model(config.model, config.seed)
        return how(model, self.accelerator, config.parallel, config.mixed_precision)

    def _make_reference(self) -> torch.nn.Module | None:
        """A frozen copy of the initial policy, if anything will ask for the KL to it."""
        config = self.config
        monitors = config.monitor_kl_every and self.method.uses_rollouts
        asks = self.needs_kl or monitors or self.method.uses_reference
        if not asks or config.model.lora is not None:
            return None  # with adapters, the reference is the model without them
        return self._prepare(setup.prepare_frozen)

    def _open_folder(self, resume: bool) -> Path | None:
        """The checkpoint to go on from; what forbids a start is found before any work."""
        guard.check_folder(self.out)
        self.checkpoints = self.out / "checkpoints"
        self.record = Record(self.out, self.accelerator)
        found = checkpoint.newest(self.checkpoints)
        if found and not resume:
            raise ValueError(
                f"out={str(self.out)!r} already holds a run: resume it, or choose another"
            )
        if found:
            saved = checkpoint.read_progress(found)
            ranks = saved["ranks"], self.accelerator.num_processes
            guard.check_same_run(
                restated(saved["config"]), dump(self.config), ranks, self.config.parallel.resize
            )
        return found

    def _start_from(self, found: Path | None) -> None:
        if found:
            self._restore(found)
        config = self.config
        more = -(-(self.feed.steps - self.step) // config.checkpoint_every)
        guard.check_space(self.out, self.model, min(more, config.keep_checkpoints + 1))
        if self.accelerator.is_main_process:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            save(config, self.out / "config.yaml")
        self.record.cut(self.step if found else None)
        if config.trackers:
            self.accelerator.init_trackers(self.out.name, config={"config": str(dump(config))})

    def _restore(self, path: Path) -> None:
        progress = checkpoint.load(path, self.model, self.optimizer, self.gradients.tracked)
        self.step, self.state = progress["step"], progress["method"]
        self.best = progress.get("best", {})  # runs of earlier versions have none
        self.guard.load_state_dict(progress["guard"])
        self.seen = Observation.restore(progress["seen"])
        self.feed.load_state_dict(progress)
        logger.info("resumed from %s", path)

    def _save(self) -> None:
        progress = {
            "method": self.state, "seen": dataclasses.asdict(self.seen), **self.feed.state_dict(),
            "guard": self.guard.state_dict(), "config": dump(self.config),
            "best": self.best, "ranks": self.accelerator.num_processes,
        }  # fmt: skip
        checkpoint.save(self.checkpoints, self.step, self.model, self.optimizer, progress,
                        self.gradients.tracked)  # fmt: skip
        checkpoint.prune(self.checkpoints, self.config.keep_checkpoints, self.best.get("step"))

    # ---- the loop

    def run(self) -> Path:
        """Train to the last step, evaluate, export. Returns the run directory."""
        bar = tqdm(total=self.feed.steps, initial=self.step, dynamic_ncols=True,
                   disable=not self.accelerator.is_main_process,
                   desc=self.config.name or self.method.name)  # fmt: skip
        try:
            with self.stop, bar, in_use(self.tally.reward):
                self._loop(bar)
        except RuntimeError as error:
            gone = self.heartbeat.gone()
            if gone is None:
                raise
            raise RunError(f"{gone}; the job goes on from {self.checkpoints}") from error
        self.heartbeat.stop()
        if self.config.export and self.accelerator.is_main_process:
            export_checkpoint(self.config.model, self._chosen(), self.out / "model")
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return self.out

    def _loop(self, bar: tqdm) -> None:
        config = self.config
        if self.step == 0:
            self._evaluate()  # the model that training starts from
        while not self._done():
            started = time.perf_counter()
            row = self._train_step()
            self.step += 1
            self.record.step({**row, "seconds": time.perf_counter() - started})
            _show(bar, row)
            if self.guard.exhausted:
                self._give_up()
            last = self._done()
            boundary = self.step % config.rollouts.reuse == 0 or last
            accuracy = self._evaluate() if last or self._due(config.eval.every) else None
            better = accuracy is not None and accuracy > self.best.get("accuracy", -math.inf)
            stopping = boundary and self._agree(self.stop.asked)
            wanted = (better and self.method.keeps_best) or self._due(config.checkpoint_every)
            if last or stopping or wanted:
                if better:
                    self.best = {"step": self.step, "accuracy": accuracy}
                self._save()
            if stopping and not last:
                raise KeyboardInterrupt(f"saved step {self.step} in {self.checkpoints}")

    def _done(self) -> bool:
        return self.step >= self.feed.steps or self.method.finished(self.state)

    def _chosen(self) -> Path:
        """The checkpoint that the run ends with."""
        best = self.best.get("step") if self.method.keeps_best else None
        return checkpoint.at(self.checkpoints, self.step if best is None else best)

    def _give_up(self) -> None:
        """Stop after too many skipped steps; the weights are those before the first of them."""
        self._save()
        raise RunError(
            f"{self.config.guards.patience} steps in a row were skipped, the last because "
            f"{self.guard.fault}; the weights before them are saved as step {self.step} in "
            f"{self.checkpoints}. Look at a kept batch with `gac replay {self.out / 'replay'}/...`"
        )

    def _due(self, every: int) -> bool:
        """Whether what happens every so many steps happens now.

        Reused rollouts are not saved: with them it happens at the next step that samples afresh.
        """
        reuse = self.config.rollouts.reuse
        boundary = every > 0 and self.step % reuse == 0
        return boundary and self.step // every > (self.step - reuse) // every

    def _agree(self, told: bool) -> bool:
        """Whether any rank was told to stop."""
        return bool(over_ranks(self.accelerator, [float(told)], "max")[0])

    # ---- one optimiser step

    def _train_step(self) -> dict[str, Any]:
        config, step = self.config, self.step
        self.state, mix = self.method.mix(self.state, self.seen)
        draw = _mix_seed(config.seed, step, self.accelerator.process_index)
        torch.manual_seed(draw)
        rows = self._rollout_rows() + self.feed.demo_rows(step)
        counts = over_ranks(self.accelerator, denominators(rows))
        ranks = self.accelerator.num_processes
        scaled = tuple(n / ranks for n in norms(counts, self.spec, self.method.pooled))
        kl = self.method.wants_kl(step) or _hits(step, config.monitor_kl_every)
        kl = self.needs_kl or (kl and self.method.rollouts_at(step))
        old = self.rollouts.old_logps if self.rollouts else ()
        self.heartbeat.where = f"step {step}, gradients"
        torch.manual_seed(draw + 1)  # what dropout draws does not hang on the sampling
        found = self.gradients(rows, mix, scaled, kl=kl, old_logps=old, step=step)
        losses = self._mean_losses(found)
        gram = found.parts.gram() if found.parts else None
        whole = gram is None or bool(gram.isfinite().all())
        solved, weights, applied = self.state, None, mix
        if found.parts and gram is not None:
            if whole:
                solved, weights = self.method.solve(self.state, gram, mix, self.seen)
            applied = found.parts.combine_pair(weights, mix)
        norm, fault = self._update(losses, 0.0 if whole else math.nan)
        if fault:
            self._keep(replay.Bad(
                step, fault, draw + 1, rows, mix, weights, scaled, kl, old, norm, losses
            ))  # fmt: skip
        else:
            self.state = solved
            self.gradients.tracked |= found.parts.averages if found.parts else {}
        if self.method.looks_back and not fault:
            after = self._mean_losses(self.gradients.losses(rows, mix, scaled, old))
            self.state = self.method.after_step(self.state, losses[::-1], after[::-1])
        return self._observe(found, norm, losses, applied, counts, rows, gram, kl)

    def _rollout_rows(self) -> list[Row]:
        if not self.method.rollouts_at(self.step):
            self.rollouts = None
            return []
        reuse, initial = self.config.rollouts.reuse, self.method.samples_reference
        if self.step % reuse == 0 or self.rollouts is None:
            examples = self.feed.examples()
            self.heartbeat.where = f"step {self.step}, rollouts"
            policy = contextlib.nullcontext(self.model)
            with (
                self.gradients.reference_model() if initial else policy as model,
                setup.gathered(model, self.config.parallel),
            ):
                self.rollouts = self.sampler(self.accelerator.unwrap_model(model), examples)
            if (reuse > 1 or self.method.looks_back) and not initial:
                self.rollouts.old_logps = self.gradients.row_logprobs(self.rollouts.rows)
        return self.rollouts.rows

    def _mean_losses(self, found: Measured) -> tuple[float, float]:
        """The rollout and the demonstration term over all ranks."""
        losses = torch.stack([found.rollout_loss, found.demo_loss]).double()
        rollout, demo = self.accelerator.reduce(losses, "mean").tolist()
        return rollout, demo

    def _update(self, losses: tuple[float, float], norm: float = 0.0) -> tuple[float, str | None]:
        """Clip, step, clear. Returns the gradient norm, and why the step was skipped if it was.

        norm: stands for the gradient's where no parameter has one.
        """
        config = self.config.optim
        set_learning_rate(self.optimizer, learning_rate(config, self.step, self.feed.steps))
        setup.reshard(self.model)  # gathered parameters are other objects, without gradient
        params = [p for p in trainable(self.model) if p.grad is not None]
        if params:
            clip = config.clip or float("inf")
            norm = setup.full(torch.nn.utils.clip_grad_norm_(params, clip))
        fault = self.guard.judge(norm, {"rollout_loss": losses[0], "demo_loss": losses[1]})
        if params and fault is None:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, fault

    def _keep(self, bad: replay.Bad) -> None:
        """Log a skipped step, and keep it for `gac replay` while there is room."""
        where = "not kept"
        if self.guard.kept < self.config.guards.keep:
            self.kept = self.kept if self.guard.in_a_row > 1 else None
            path = replay.keep(
                self.out / "replay", bad, self.model, self.gradients.tracked, self.kept
            )
            self.kept = self.kept or path
            self.guard.kept += 1
            where = f"gac replay {path}"
        if self.accelerator.is_main_process:
            logger.warning("step %d is skipped: %s (%s)", bad.step, bad.fault, where)

    def _observe(
        self, found: Measured, norm: float, losses: tuple[float, float], mix: Mix,
        counts: list[float], rows: list[Row], gram: torch.Tensor | None, kl: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """The metrics of the step; also what the method sees before the next one."""
        total = found.moments.all_reduce()
        signals, corrections = None, None
        if self.method.wants_signals(self.step) and not self.guard.in_a_row:
            count = 0 if gram is None else len(gram) // 2
            evidence = Evidence(self.step, total, gram, count, found.bias_gram)
            self.state, signals, corrections = self.method.read(self.state, evidence)
        scalars = torch.stack([total.kl, total.entropy, total.clip_fraction]).tolist()
        rewards = self.rollouts.rewards if self.rollouts else []
        squares = sum(r * r for r in rewards)
        sums = [len(rewards), sum(rewards), squares, sum(len(r.ids) for r in rows)]
        n, mean, square, tokens = over_ranks(self.accelerator, sums)
        row: dict[str, Any] = {
            "step": self.step + 1, "mu": mix.mu, "mu_star": None, "prior": None, "alpha": None,
            "kl": scalars[0] if kl and n else None, **total.signals(self.method.trim)._asdict(),
            # a term without a row has the value 0, which nothing measured
            "rollout_loss": losses[0] if counts[0] else None,
            "demo_loss": losses[1] if counts[2] else None,
            "reward_mean": mean / n if n else None, "entropy": scalars[1],
            "clip_fraction": scalars[2] if counts[0] else None,
            "response_length": counts[1] / counts[0] if counts[0] else None,
            "grad_norm": norm, "skipped": self.guard.skipped, "tokens": int(tokens),
            "lr": self.optimizer.param_groups[0]["lr"],
            **self.tally.news(), **self.method.report(self.state),
        }  # fmt: skip
        if self.guard.in_a_row:  # nothing that a broken step measured may steer the next one
            self.seen = Observation(self.step + 1)
            return row
        self.seen = Observation(
            self.step + 1, signals, row["kl"], row["entropy"], row["reward_mean"],
            square / n - (mean / n) ** 2 if n else None, row["rollout_loss"], row["demo_loss"],
            corrections,
        )  # fmt: skip
        return row

    # ---- evaluation

    def _evaluate(self) -> float | None:
        """Record an evaluation; its accuracy, if there is anything to evaluate on."""
        if not self.eval_examples:
            return None
        model = self.accelerator.unwrap_model(self.model)
        self.heartbeat.where = f"step {self.step}, evaluation"
        with setup.gathered(self.model, self.config.parallel):
            found = evaluate(model, self.tokenizer, self.eval_examples, self.sampler.reward,
                             self.config.eval, self.config.seed)  # fmt: skip
        self.record.evaluation({"step": self.step, **found})
        return found.get("accuracy")


def _show(bar: tqdm, row: dict[str, Any]) -> None:
    shown = {k: row[k] for k in ("mu", "reward_mean", "kl", "entropy")}
    texts = {k: f"{v:.3g}" for k, v in shown.items() if v is not None and not math.isnan(v)}
    bar.set_postfix(texts, refresh=False)
    bar.update()


def _hits(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mix_seed(seed: int, step: int, rank: int) -> int:
    """A seed of its own for each step and rank."""
    digest = hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
