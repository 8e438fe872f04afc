"""The training loop: sample, score, one fused loss, one optimiser step, one line in the record.

Everything random in step t is drawn from (seed, t, rank), so a resumed run repeats a run that was
never stopped. The trainer never names a method; see `methods/base.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from gac_kernels import Signals

from . import checkpoint, distributed, guards, replay
from .batch import Row, denominators, norms
from .config import dump, save
from .data import Order, load_demos, load_prompts
from .evaluate import evaluate
from .experience import Rollouts, Sampler
from .export import export_checkpoint
from .gradients import Gradients, Measured, over_ranks
from .guards import Guard, RunError
from .heartbeat import Heartbeat
from .logbook import Logbook
from .methods import Mix, Observation
from .model import load_model, load_tokenizer
from .optim import learning_rate, make_optimizer, set_learning_rate, trainable
from .rewards import build_reward
from .stopping import StopRequest
from .train_config import TrainConfig

logger = logging.getLogger(__name__)


def train(config: TrainConfig, resume: bool = True) -> Path:
    """Run the training that `config` describes, from its last checkpoint if it has one.

    Returns the run directory. Raises KeyboardInterrupt after saving when it is interrupted.
    """
    return Trainer(config, resume).run()


class Trainer:
    """One run. State between steps: step, method state, last observation, data positions."""

    def __init__(self, config: TrainConfig, resume: bool = True) -> None:
        self.config, self.method = config, config.method
        self.out = Path(config.out)
        self.accelerator = distributed.make_accelerator(
            config.parallel, config.mixed_precision, config.trackers, config.out
        )
        self.heartbeat = Heartbeat()
        found = self._open_folder(resume)
        self.tokenizer = load_tokenizer(config.model)
        self.spec = self.method.spec(config.loss)
        self._load_data()
        self.needs_kl = self.spec.kl_coef != 0
        self.model = self._prepare(distributed.prepare)
        self.reference = self._make_reference()
        self.optimizer = make_optimizer(self.model, config.optim)
        self.sampler = Sampler(config.rollouts, self.tokenizer, build_reward(config.reward))
        self.rollouts: Rollouts | None = None
        self.gradients = Gradients(
            self.accelerator, self.model, self.reference, self.spec,
            temperature=config.rollouts.temperature, micro_batch=config.micro_batch,
            pad_token=self.tokenizer.pad_token_id,
        )  # fmt: skip
        self.step, self.state, self.seen = 0, self.method.init(), Observation(0)
        self.guard, self.stop = Guard(config.guards), StopRequest()
        self.kept: Path | None = None  # where the last skipped step is, for `gac replay`
        self._start_from(found)

    # ---- set-up

    def _load_data(self) -> None:
        config, ranks = self.config, self.accelerator.num_processes
        if self.method.uses_rollouts:
            self.prompts = load_prompts(config.data, self.tokenizer, training=True)
            self.prompt_order = Order(len(self.prompts), config.seed)
            _divides("rollouts.prompts", config.rollouts.prompts, ranks)
        if self.method.uses_demos:
            self.demos = load_demos(config.data, self.tokenizer)
            self.demo_order = Order(len(self.demos), config.seed + 1)
            _divides("demo_batch", config.demo_batch, ranks)
        self.eval_examples = (
            load_prompts(config.eval.data, self.tokenizer) if config.eval.data.prompts else []
        )

    def _prepare(self, how: Any) -> torch.nn.Module:
        config = self.config
        model = load_model(config.model, config.seed)
        return how(model, self.accelerator, config.parallel, config.mixed_precision)

    def _make_reference(self) -> torch.nn.Module | None:
        """A frozen copy of the initial policy, if anything will ask for the KL to it."""
        config = self.config
        asks = self.needs_kl or config.monitor_kl_every or self.method.wants_signals(0)
        if not (asks and self.method.uses_rollouts) or config.model.lora is not None:
            return None  # with adapters, the reference is the model without them
        return self._prepare(distributed.prepare_frozen)

    def _open_folder(self, resume: bool) -> Path | None:
        """The checkpoint to go on from; what forbids a start is found before any work."""
        guards.check_folder(self.out)
        self.checkpoints = self.out / "checkpoints"
        self.metrics, self.evals = (
            Logbook(self.out / "metrics.jsonl"),
            Logbook(self.out / "eval.jsonl"),
        )
        found = checkpoint.newest(self.checkpoints)
        if found and not resume:
            raise ValueError(
                f"out={str(self.out)!r} already holds a run: resume it, or choose another"
            )
        if found:
            saved = checkpoint.read_progress(found)
            ranks = saved["ranks"], self.accelerator.num_processes
            guards.check_same_run(
                saved["config"], dump(self.config), ranks, self.config.parallel.resize
            )
        return found

    def _start_from(self, found: Path | None) -> None:
        if found:
            self._restore(found)
        config = self.config
        more = -(-(config.steps - self.step) // config.checkpoint_every)
        guards.check_space(self.out, self.model, min(more, config.keep_checkpoints + 1))
        if self.accelerator.is_main_process:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            save(config, self.out / "config.yaml")
            self.metrics.cut(self.step)
            self.evals.cut(self.step)
        if config.trackers:
            self.accelerator.init_trackers(self.out.name, config={"config": str(dump(config))})

    def _restore(self, path: Path) -> None:
        progress = checkpoint.load(path, self.model, self.optimizer)
        self.step, self.state = progress["step"], progress["method"]
        self.guard.load_state_dict(progress["guard"])
        self.seen = Observation(**progress["seen"])
        if self.seen.signals is not None:
            self.seen = dataclasses.replace(self.seen, signals=Signals(*self.seen.signals))
        for name in ("prompt_order", "demo_order"):
            if hasattr(self, name):
                getattr(self, name).load_state_dict(progress[name])
        logger.info("resumed from %s", path)

    def _save(self) -> None:
        orders = {n: getattr(self, n).state_dict() for n in ("prompt_order", "demo_order")
                  if hasattr(self, n)}  # fmt: skip
        progress = {
            "method": self.state, "seen": dataclasses.asdict(self.seen), **orders,
            "guard": self.guard.state_dict(), "config": dump(self.config),
            "ranks": self.accelerator.num_processes,
        }  # fmt: skip
        checkpoint.save(self.checkpoints, self.step, self.model, self.optimizer, progress)
        checkpoint.prune(self.checkpoints, self.config.keep_checkpoints)

    # ---- the loop

    def run(self) -> Path:
        """Train to the last step, evaluate, export. Returns the run directory."""
        bar = tqdm(total=self.config.steps, initial=self.step, dynamic_ncols=True,
                   disable=not self.accelerator.is_main_process,
                   desc=self.config.name or self.method.name)  # fmt: skip
        try:
            with self.stop, bar:
                self._loop(bar)
        except RuntimeError as error:
            gone = self.heartbeat.gone()
            if gone is None:
                raise
            raise RunError(f"{gone}; the job goes on from {self.checkpoints}") from error
        if self.config.export and self.accelerator.is_main_process:
            last = checkpoint.complete(self.checkpoints)[-1]
            export_checkpoint(self.config.model, last, self.out / "model")
        self.accelerator.end_training()
        return self.out

    def _loop(self, bar: tqdm) -> None:
        config = self.config
        while self.step < config.steps:
            started = time.perf_counter()
            row = self._train_step()
            self.step += 1
            self._record({**row, "seconds": time.perf_counter() - started}, bar)
            if self.guard.exhausted:
                self._give_up()
            last = self.step == config.steps
            if last or (config.eval.every and self.step % config.eval.every == 0):
                self._evaluate()
            boundary = self.step % config.rollouts.reuse == 0 or last
            stopping = boundary and self._agree(self.stop.asked)
            if boundary and (last or stopping or self._due()):
                self._save()
            if stopping and not last:
                raise KeyboardInterrupt(f"saved step {self.step} in {self.checkpoints}")

    def _give_up(self) -> None:
        """Stop after too many skipped steps; the weights are those before the first of them."""
        self._save()
        raise RunError(
            f"{self.config.guards.patience} steps in a row were skipped, the last because "
            f"{self.guard.fault}; the weights before them are saved as step {self.step} in "
            f"{self.checkpoints}. Look at a kept batch with `gac replay {self.out / 'replay'}/...`"
        )

    def _due(self) -> bool:
        # with reused rollouts, checkpoints fall on the first boundary after the due step
        reuse, every = self.config.rollouts.reuse, self.config.checkpoint_every
        return self.step // every > (self.step - reuse) // every

    def _agree(self, told: bool) -> bool:
        """Whether any rank was told to stop."""
        return bool(over_ranks(self.accelerator, [float(told)], "max")[0])

    # ---- one optimiser step

    def _train_step(self) -> dict[str, Any]:
        config, step = self.config, self.step
        self.state, mix = self.method.mix(self.state, self.seen)
        draw = _mix_seed(config.seed, step, self.accelerator.process_index)
        torch.manual_seed(draw)
        rows = self._rollout_rows() + self._demo_rows()
        counts = over_ranks(self.accelerator, denominators(rows))
        ranks = self.accelerator.num_processes
        scaled = tuple(n / ranks for n in norms(counts, self.spec))
        measure = self.method.wants_signals(step)
        kl = self.needs_kl or measure or _hits(step, config.monitor_kl_every)

        old = self.rollouts.old_logps if self.rollouts else ()
        kl = kl and self.method.uses_rollouts
        self.heartbeat.where = f"step {step}, gradients"
        torch.manual_seed(draw + 1)  # what dropout draws does not hang on the sampling
        found = self.gradients(rows, mix, scaled, kl=kl, old_logps=old)
        losses = self._mean_losses(found)
        norm, fault = self._update(losses)
        if fault:
            self._keep(replay.Bad(
                step, fault, draw + 1, rows, mix, scaled, kl, old, norm, losses
            ))  # fmt: skip
        return self._observe(found, norm, losses, mix, counts, rows, measure, kl)

    def _rollout_rows(self) -> list[Row]:
        if not self.method.uses_rollouts:
            return []
        settings, accelerator = self.config.rollouts, self.accelerator
        if self.step % settings.reuse == 0 or self.rollouts is None:
            taken = self.prompt_order.take(settings.prompts)
            mine = taken[accelerator.process_index :: accelerator.num_processes]
            examples = [self.prompts[i] for i in mine]
            self.heartbeat.where = f"step {self.step}, rollouts"
            with distributed.gathered(self.model, self.config.parallel):
                self.rollouts = self.sampler(accelerator.unwrap_model(self.model), examples)
            if settings.reuse > 1:
                self.rollouts.old_logps = self.gradients.row_logprobs(self.rollouts.rows)
        return self.rollouts.rows

    def _demo_rows(self) -> list[Row]:
        if not self.method.uses_demos:
            return []
        taken = self.demo_order.take(self.config.demo_batch)
        mine = taken[self.accelerator.process_index :: self.accelerator.num_processes]
        examples = [self.demos[i] for i in mine]
        return [Row(e.prompt + e.demo, len(e.prompt), True) for e in examples]

    def _mean_losses(self, found: Measured) -> tuple[float, float]:
        """The rollout and the demonstration term over all ranks."""
        losses = torch.stack([found.rollout_loss, found.demo_loss]).double()
        rollout, demo = self.accelerator.reduce(losses, "mean").tolist()
        return rollout, demo

    def _update(self, losses: tuple[float, float]) -> tuple[float, str | None]:
        """Clip, step, clear. Returns the gradient norm, and why the step was skipped if it was."""
        config = self.config.optim
        set_learning_rate(self.optimizer, learning_rate(config, self.step, self.config.steps))
        params = [p for p in trainable(self.model) if p.grad is not None]
        norm = 0.0
        if params:
            clip = config.clip or float("inf")
            norm = distributed.full(torch.nn.utils.clip_grad_norm_(params, clip))
        fault = self.guard.judge(norm, {"rollout_loss": losses[0], "demo_loss": losses[1]})
        if params and fault is None:
            distributed.reshard(self.model)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, fault

    def _keep(self, bad: replay.Bad) -> None:
        """Log a skipped step, and keep it for `gac replay` while there is room."""
        where = "not kept"
        if self.guard.kept < self.config.guards.keep:
            last = self.kept if self.guard.in_a_row > 1 else None
            self.kept = replay.keep(self.out / "replay", bad, self.model, last)
            self.guard.kept += 1
            where = f"gac replay {self.kept}"
        if self.accelerator.is_main_process:
            logger.warning("step %d is skipped: %s (%s)", bad.step, bad.fault, where)

    def _observe(
        self, found: Measured, norm: float, losses: tuple[float, float], mix: Mix,
        counts: list[float], rows: list[Row], measure: bool, kl: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """The metrics of the step; also what the method sees before the next one."""
        total = found.moments.all_reduce()
        signals = total.signals(self.method.trim)
        rollout_loss, demo_loss = losses
        scalars = torch.stack([total.kl, total.entropy, total.clip_fraction]).tolist()
        rewards = self.rollouts.rewards if self.rollouts and self.method.uses_rollouts else []
        squares = sum(r * r for r in rewards)
        sums = [len(rewards), sum(rewards), squares, sum(len(r.ids) for r in rows)]
        n, mean, square, tokens = over_ranks(self.accelerator, sums)
        row: dict[str, Any] = {
            "step": self.step + 1, "mu": mix.mu, "mu_star": None, "prior": None, "alpha": None,
            "kl": scalars[0] if kl and n else None, **signals._asdict(),
            "rollout_loss": rollout_loss, "demo_loss": demo_loss,
            "reward_mean": mean / n if n else None, "entropy": scalars[1],
            "clip_fraction": scalars[2],
            "response_length": counts[1] / counts[0] if counts[0] else None,
            "grad_norm": norm, "skipped": self.guard.skipped, "tokens": int(tokens),
            "lr": self.optimizer.param_groups[0]["lr"],
            **self.method.report(self.state),
        }  # fmt: skip
        if self.guard.in_a_row:  # nothing that a broken step measured may steer the next one
            self.seen = Observation(self.step + 1)
            return row
        self.seen = Observation(
            self.step + 1, signals if measure else None, row["kl"], row["entropy"],
            row["reward_mean"], square / n - (mean / n) ** 2 if n else None,
            rollout_loss if n else None, demo_loss if self.method.uses_demos else None,
        )  # fmt: skip
        return row

    # ---- records

    def _record(self, row: dict[str, Any], bar: tqdm) -> None:
        if self.accelerator.is_main_process:
            self.metrics.append(row)
        if self.config.trackers:
            numbers = {k: v for k, v in row.items() if v is not None and k != "step"}
            self.accelerator.log(numbers, step=row["step"])
        shown = {k: row[k] for k in ("mu", "reward_mean", "kl", "entropy") if row[k] is not None}
        bar.set_postfix({k: f"{v:.3g}" for k, v in shown.items()}, refresh=False)
        bar.update()

    def _evaluate(self) -> None:
        if not self.eval_examples:
            return
        model = self.accelerator.unwrap_model(self.model)
        self.heartbeat.where = f"step {self.step}, evaluation"
        with distributed.gathered(self.model, self.config.parallel):
            found = evaluate(model, self.tokenizer, self.eval_examples, self.sampler.reward,
                             self.config.eval, self.config.seed)  # fmt: skip
        if self.accelerator.is_main_process:
            self.evals.append({"step": self.step, **found})
            if found.get("accuracy", 0.0) > checkpoint.read_best(self.checkpoints).get(
                "accuracy", -1.0
            ):
                checkpoint.write_best(self.checkpoints, self.step, found["accuracy"])


def _hits(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mix_seed(seed: int, step: int, rank: int) -> int:
    """A seed of its own for each step and rank."""
    digest = hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _divides(name: str, value: int, ranks: int) -> None:
    if value % ranks:
        raise ValueError(f"{name}={value}: use a multiple of the {ranks} processes")
