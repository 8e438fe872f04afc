"""The training loop: sample, score, compute the loss, step the optimizer, log one line.

All randomness in step t is seeded by (seed, t, rank), so a resumed run reproduces an uninterrupted
one. The trainer does not depend on any particular method; see `methods/base.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gac import collectives
from gac.config import dump, save
from gac.data.micro_batches import rebalance
from gac.errors import CheckpointError, ConfigError, RunError, UserError, value_errors_as
from gac.evaluation.suite import Evaluator
from gac.faults import checkpoint
from gac.faults.processes import Heartbeat, StopRequest
from gac.methods import Mix, Observation
from gac.models.adapters import check_server
from gac.models.causal_lm import load_tokenizer
from gac.parallel import process_group, seeds, sharding
from gac.parallel.run_lock import run_lock
from gac.rewards import Reward, Tally, build_reward, closing_reward
from gac.rollouts.engines import Engine
from gac.rollouts.generation import stop_tokens
from gac.rollouts.sampling import Sampler
from gac.rollouts.stats import Rollouts
from gac.rows import Counts, Row, count
from gac.step_end import end_step, next_mix
from gac.train_config import OptimConfig, TrainConfig, loss_of, plan_of
from gac.training.export import export_checkpoint
from gac.types import StepNeeds, TermPair

from .feed import Feed
from .policy import (
    choose_micro_batches,
    load_policy,
    load_reference,
    make_gradients,
    make_optimizer,
    memory_advice,
    warn_of_rounding,
)
from .record import Record, show
from .replay import SkippedStep
from .startup import (
    FORMAT,
    check_evaluation,
    check_fingerprint,
    check_space,
    find_checkpoint,
    fingerprint,
)
from .step import Guard, Measured, Rewards, Step, Update, step_result, trainer_columns
from .teacher import check_teacher_model, load_teacher, make_teacher

logger = logging.getLogger(__name__)


def train(config: TrainConfig, resume: bool = True) -> Path:
    """Train as `config` specifies, resuming from the last checkpoint if there is one.

    Args:
        config: the configuration, as `gac train` reads it from a file.
        resume: if False, fail when the run directory already holds a run.

    Returns:
        The run directory.

    Raises:
        UserError: the configuration, the data or the machine does not allow the run; the message
        says why.
        RunError: the run had to stop; the message says what to do.
        KeyboardInterrupt: the run was interrupted; a checkpoint has been saved.
    """
    try:
        with run_lock(Path(config.out)):
            return Trainer(config, resume).run()
    finally:
        process_group.leave()


class Trainer:
    """A training run: its parts, restored from the last checkpoint if there is one, and the loop.

    State between steps: the step, the tokens so far, the method's state, the mix of the next step,
    the data positions.
    """

    @value_errors_as(ConfigError)
    def __init__(self, config: TrainConfig, resume: bool = True) -> None:
        self.method = config.method.for_run(config.steps)
        self.out = Path(config.out)
        self.checkpoints = self.out / "checkpoints"
        self.accelerator = process_group.make_accelerator(
            config.parallel, config.report_to, config.out
        )
        self.heartbeat = Heartbeat()
        self.record = Record(self.out, self.accelerator)
        self.config, path = find_checkpoint(config, resume)
        # first the inputs, whose errors must not wait for the model
        longest = self._load_data()
        needs = StepNeeds.union(map(self.needs, range(config.steps)))
        reward = build_reward(config.reward)
        self.tally = Tally(reward)
        self.evaluator = Evaluator(self.config.eval, self.tokenizer, reward, self.config.seed)
        jobs = self.evaluator.jobs
        longest = max(longest, check_evaluation(self.config.model, self.tokenizer, jobs))
        self._start_engine(needs, longest)
        self._load_models(needs)
        self._start_training(needs, reward)
        self.fingerprint = fingerprint(self.config, self.tokenizer, self.feed.sources(), reward)
        self._open(path)

    def _load_data(self) -> int:
        """The tokenizer and the data; returns the most tokens of a prompt with its response."""
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        stop_tokens(self.tokenizer, config.rollouts.stop)  # fails early
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.feed = Feed(config, self.tokenizer, rank, ranks)
        self.plan = plan_of(config)
        self.kl_in_loss = loss_of(config).spec.kl_coef != 0
        longest = self.feed.check_budgets(config)
        check_teacher_model(config, self.tokenizer, longest)
        return longest

    def _start_engine(self, needs: StepNeeds, longest: int) -> None:
        """The engine that samples, for rows of at most `longest` tokens."""
        rollouts = self.config.rollouts
        if not needs.rollouts:  # no server is contacted
            rollouts = dataclasses.replace(rollouts, engine="generate")
        self.engine = Engine(
            rollouts,
            self.tokenizer,
            served=self.config.model.path,
            longest=longest,
            folder=self.out,
        )
        self.on_server = rollouts.engine == "vllm"
        # a server samples without the weights of this process
        self.gathers = self.config.parallel.gather_for_rollouts and not self.on_server

    def _load_models(self, needs: StepNeeds) -> None:
        """The policy and the reference; then the micro-batches that fit beside them."""
        self.model = load_policy(self.config, self.accelerator)
        self.policy = self.accelerator.unwrap_model(self.model)
        if self.on_server:
            check_server(self.policy)
        self.reference = load_reference(self.config, self.accelerator, needs.kl)
        self.teacher_model = load_teacher(self.config, self.accelerator)
        longest = self.feed.longest_row(self.config.rollouts.max_completion_length)
        self.config = choose_micro_batches(self.config, self.accelerator, self.model, longest)
        by_tokens = bool(self.config.max_tokens_per_micro_batch)
        self.feed.balances = by_tokens and self.feed.may_balance
        if self.accelerator.is_main_process:
            warn_of_rounding(self.model, self.config.optim.lr)

    def _start_training(self, needs: StepNeeds, reward: Reward) -> None:
        """Optimizer, gradients and sampler, and the state before the first step."""
        config = self.config
        self.optimizer = make_optimizer(self.model, config.optim)
        self.gradients = make_gradients(
            config,
            self.accelerator,
            tokenizer=self.tokenizer,
            model=self.model,
            reference=self.reference,
            needs=needs,
            teacher=self.teacher_model,
        )
        self.teacher = make_teacher(config, self.gradients.forward, self.teacher_model)
        self.sampler = Sampler(
            config.rollouts,
            self.engine,
            tokenizer=self.tokenizer,
            reward=reward,
            plan=self.plan,
            credit=self.method.credit,
            more=self.feed.more_examples,
            demos=needs.demos,
            seed=config.seed,
        )
        self.rollouts: Rollouts | None = None
        self.step = self.tokens = 0  # optimizer steps, and the tokens of their rows
        self.state, self.mix = next_mix(self.method, self.method.init(), Observation(0))
        self.ended = False  # the method has ended the run
        self.evaluated = True  # after the last step, if that was due
        self.guard, self.stop = Guard(config.guards), StopRequest()
        self.best: dict[str, Any] = {}  # step and accuracy of the best checkpoint
        self.first_skipped: Path | None = None  # first of the current consecutive skipped steps

    def needs(self, step: int) -> StepNeeds:
        """The method's needs for a step, plus the KL if the loss or the monitoring needs it."""
        needs, every = self.method.needs(step), self.config.monitor_kl_every
        monitored = needs.rollouts and every > 0 and step % every == 0
        return needs._replace(
            kl=self.kl_in_loss or monitored or (needs.kl and needs.rollouts),
            sources=self.feed.names_sources and needs.demos,
        )

    def run(self) -> Path:
        """Train to the last step, evaluate, export. Returns the run directory."""
        bar = tqdm(
            total=self.feed.steps,
            initial=self.step,
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process or not sys.stderr.isatty(),
            bar_format="{n_fmt}/{total_fmt} |{bar:10}| {desc}",
        )
        bar._time = time.monotonic  # the system clock may jump
        bar.start_t = bar.last_print_t = time.monotonic()
        try:
            with (
                self.stop,
                bar,
                logging_redirect_tqdm(),
                closing_reward(self.tally.reward),
                contextlib.closing(self.evaluator),
            ):
                self._loop(bar)
        except UserError:  # if only this rank raised it, the other ranks fail below
            raise
        except RuntimeError as error:
            message = self.heartbeat.dead_rank_message()
            if isinstance(error, torch.OutOfMemoryError) or "t allocate memory" in str(error):
                longest = self.feed.longest_row(self.config.rollouts.max_completion_length)
                activity = self.heartbeat.activity
                advice = memory_advice(self.config, activity, self.step, longest)
                raise RunError(f"out of memory {advice}") from error
            if message is None:
                raise
            advice = f"restart the job to resume from {self.checkpoints}"
            raise RunError(f"{message}; {advice}") from error
        self.heartbeat.stop()
        if self.config.export and self.accelerator.is_main_process:
            best = self.best.get("step") if self.method.keeps_best else None
            path = checkpoint.find(self.checkpoints, self.step if best is None else best)
            export_checkpoint(self.config.model, path, self.out / "model")
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return self.out

    def _loop(self, bar: tqdm) -> None:
        if self.step == 0:
            self._evaluate()  # the initial model
        elif not self.evaluated:
            self._checkpoint()
        elif self._done():
            logger.info(
                "the run is finished: %d of %d steps; to train on, raise `%s`; to start anew, "
                "choose another `out`",
                self.step,
                self.feed.steps,
                "budget_tokens" if self._budget_is_spent() else "steps",
            )
        while not self._done():
            started, t, settings = time.perf_counter(), self.step, self.config.rollouts
            row = self._train_step()
            self.step, self.evaluated = self.step + 1, False
            self.tokens += row["tokens"]
            seconds = time.perf_counter() - started
            row |= {
                "sampling_share": row["sampling_seconds"] / seconds,
                "tokens_per_second": row["tokens"] / seconds,
                "seconds": seconds,
                **({"ended": 1} if self._done() and self.step < self.config.steps else {}),
            }
            self.record.step(row)
            offset = t % max(settings.log_samples_every, 1)  # reused rollouts are not logged again
            if self.rollouts and self.rollouts.step == t and offset < settings.num_iterations:
                self.record.samples(self.step, self.sampler.samples, settings)
            show(bar, row)
            if self.guard.exhausted:
                self._abort()
            self._checkpoint()

    def _train_step(self) -> dict[str, Any]:
        """One iteration of the paper's Algorithm 1; the method chose mu_t after step t - 1.

        Returns the step's row of `metrics.jsonl`.
        """
        with self._kept():
            rows = self._sample()  # B_r, with rewards and advantages, and B_s
            events = self.tally.new_counts()
        step = self._assemble(rows, self.mix)
        measured = self.gradients(step)  # of (1 - mu_t) L_RL + mu_t L_SFT
        update = self._apply(step, measured)  # theta_t
        after = self.gradients.losses(step) if step.needs.losses_after else None
        fresh = self.rollouts if self.rollouts and self.rollouts.step == self.step else None
        columns = trainer_columns(step, measured, update, fresh, events)
        self.ended = self.mix.final
        result = step_result(step, measured, update, after)
        row, self.state, self.mix = end_step(self.method, self.state, result)  # mu_t+1
        return row | columns | {"skipped": self.guard.skipped}

    # ---- between steps

    def _checkpoint(self) -> None:
        """Evaluate and save if due; after a stop request, save and raise KeyboardInterrupt."""
        last = self._done()
        with self._kept():
            accuracy = self._evaluate() if last or self._due(self.config.eval.every) else None
        self.evaluated = True
        better = accuracy is not None and accuracy > self.best.get("accuracy", -math.inf)
        boundary = self.step % self.config.rollouts.num_iterations == 0
        stopping = boundary and any(collectives.largest([self.stop.requested]))  # on any rank
        due = (better and self.method.keeps_best) or self._due(self.config.checkpoint_every)
        if last or stopping or due:
            if better:
                self.best = {"step": self.step, "accuracy": accuracy}
            self.save()
        if stopping and not last:
            raise KeyboardInterrupt(f"saved step {self.step} in {self.checkpoints}")

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Save a checkpoint if the user's code ends the run in this context, in a single process.

        Nothing in the context may change the weights; positions in the data are restored. A step
        that reuses rollouts is not saved, because checkpoints do not contain them.
        """
        try:
            yield
        except (UserError, SystemExit, KeyboardInterrupt):
            ranks, period = self.accelerator.num_processes, self.config.rollouts.num_iterations
            reuses = self.rollouts is not None and self.step % period and not self._done()
            if self.step and ranks == 1 and not (reuses or self.stop.requested):
                self.feed.undo(self.step)
                self.save()
                logger.warning("saved step %d in %s", self.step, self.checkpoints)
            raise

    def _done(self) -> bool:
        return self.step >= self.feed.steps or self.ended or self._budget_is_spent()

    def _budget_is_spent(self) -> bool:
        budget = self.config.budget_tokens
        return budget is not None and self.tokens >= budget

    def _abort(self) -> None:
        """Save a checkpoint and abort, after too many consecutive skipped steps."""
        self.save()
        raise RunError(
            f"guards.patience={self.config.guards.patience}: too many consecutive steps were "
            f"skipped, the last because {self.guard.fault}; the weights from before those "
            f"steps are saved as step {self.step} in {self.checkpoints}"
            + (f". Inspect one: `gac replay {self.out / 'replay'}/...`" if self.guard.kept else "")
        )

    def _due(self, every: int) -> bool:
        """Whether a periodic action is due at this step.

        Checkpoints do not contain rollouts, so with rollouts.num_iterations > 1 the action waits
        until the next step samples new ones.
        """
        reuse = self.config.rollouts.num_iterations
        boundary = every > 0 and self.step % reuse == 0
        return boundary and self.step // every > (self.step - reuse) // every

    def _evaluate(self) -> float | None:
        """Run and log an evaluation; returns its accuracy, or None without evaluation data."""
        if not self.evaluator:
            return None
        self.heartbeat.activity = f"step {self.step}, evaluation"
        with sharding.gathered(self.model, self.gathers):
            samples = self.out / "evals" / f"step-{self.step:08d}.jsonl.gz"
            engine = self.engine.load(self.policy)
            results = self.evaluator(engine, samples if self.accelerator.is_main_process else None)
        self.record.evaluation({"step": self.step, **results})
        return results.get("accuracy")

    # ---- one step

    def _sample(self) -> list[Row]:
        """This rank's rollouts, new or reused from the step before, and its demonstrations."""
        needs, reuse = self.needs(self.step), self.config.rollouts.num_iterations
        demos = self.feed.demo_rows(self.step) if needs.demos else []
        if not needs.rollouts:
            self.rollouts = None
            return demos
        if self.rollouts is not None and self.step % reuse:
            return self.rollouts.rows + demos
        examples, initial = self.feed.examples(self.step), self.plan.from_reference
        self.heartbeat.activity = f"step {self.step}, rollouts"
        seeds.seed(seeds.derive_seed(self.config.seed, self.step, self.accelerator.process_index))
        policy = contextlib.nullcontext(self.model)
        with (
            self.gradients.forward.reference_model() if initial else policy as model,
            sharding.gathered(model, self.gathers),
        ):
            unwrapped = self.policy if model is self.model else model
            self.rollouts = rollouts = self.sampler(unwrapped, examples, self.step)
        self.heartbeat.activity = f"step {self.step}, log-probs"
        settings = self.config.rollouts.temperature, self.config.rollouts.top_p
        if initial or settings != (1, 1):  # not comparable, as in `loss_of`
            rollouts.rows = [row._replace(engine_logps=()) for row in rollouts.rows]
        if self.feed.balances:
            rollouts.rows = rebalance(rollouts.rows, self.feed.unit)
        if (reuse > 1 or needs.losses_after) and not initial:
            rollouts.old_logps = self.gradients.forward.row_logprobs(rollouts.rows)
        if self.teacher is not None:
            scores = self.teacher.score(rollouts.rows)
            rollouts.teacher_logps, rollouts.teacher_ids = scores.logps, scores.ids
            rollouts.teacher_hidden = scores.hidden
            collectives.add_sums(rollouts.means, scores.means())
        if needs.demos and self.plan.collect:
            demos = self.feed.demo_rows(self.step, rollouts.collected)
        return rollouts.rows + demos

    def _assemble(self, rows: list[Row], mix: Mix) -> Step:
        """Build the `Step`, with counts and rewards summed over all ranks."""
        own_rewards = Rewards.of(self.rollouts.rewards if self.rollouts else [])
        self.heartbeat.activity = f"step {self.step}, gradients"
        sums = collectives.total([*count(rows), *own_rewards])
        split, seed = len(Counts._fields), self.config.seed
        return Step(
            number=self.step,
            rows=tuple(rows),
            mix=mix,
            counts=Counts(*sums[:split]),
            rewards=Rewards(*sums[split:]),
            needs=self.needs(self.step),
            old_logps=tuple(self.rollouts.old_logps if self.rollouts else ()),
            seed=seeds.derive_seed(seed, self.step, self.accelerator.process_index) + 1,
            teacher_logps=tuple(self.rollouts.teacher_logps if self.rollouts else ()),
            teacher_ids=tuple(self.rollouts.teacher_ids if self.rollouts else ()),
            teacher_hidden=tuple(self.rollouts.teacher_hidden if self.rollouts else ()),
            teacher_head=() if self.teacher is None else self.teacher.head,
        )

    def _apply(self, step: Step, measured: Measured) -> Update:
        """Update the weights and the method state, or skip the step and leave both unchanged."""
        state, weights, mix = self.state, None, step.mix
        finite = measured.gram is None or bool(measured.gram.isfinite().all())
        if measured.parts and measured.gram is not None:
            if finite:
                state, weights = self.method.solve(state, measured.gram, mix)
            mix = measured.parts.combine_pair(weights, mix)
        lr = learning_rate(self.config.optim, step.number, self.feed.steps)
        norm = sharding.clip_gradient(self.model, self.optimizer, self.config.optim.max_grad_norm)
        norm = norm if finite else math.nan
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        losses = measured.losses
        judged = {"rollout_loss": losses.rollout, "demo_loss": losses.demo}
        fault = self.guard.judge(norm, judged | {"teacher_loss": measured.teacher_loss or 0.0})
        moved = None
        if fault is None:
            self.state = state
            moved = self._update_weights()
            self.gradients.tracked |= measured.parts.averages if measured.parts else {}
            if self.teacher is not None:
                self.teacher.follow()
        else:
            solved = None if weights is None else TermPair(*weights)
            self._save_skipped(
                SkippedStep(step=step, term_weights=solved, fault=fault, norm=norm, losses=losses)
            )
        self.optimizer.zero_grad()
        return Update(mix, norm, lr, fault, moved)

    def _update_weights(self) -> float | None:
        """Let the optimizer update the weights; returns how far they moved, if that is logged."""
        if not self.config.log_update_norm:
            self.optimizer.step()
            return None
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in trained]
        self.optimizer.step()
        return sharding.distance(trained, before)

    def _save_skipped(self, skipped: SkippedStep) -> None:
        """Log a skipped step; save the first `guards.max_saved_steps` of them for `gac replay`."""
        advice = "not saved"
        if self.guard.kept < self.config.guards.max_saved_steps:
            first = self.first_skipped if self.guard.consecutive > 1 else None
            self.first_skipped = None
            try:
                path = skipped.save(self.out / "replay", self.model, self.gradients.tracked, first)
            except CheckpointError as error:  # e.g. the disk is full; the copy is optional
                advice = f"not saved: {str(error).partition(';')[0]}"
            else:
                self.first_skipped = first or path
                self.guard.kept += 1
                advice = f"gac replay {path}"
        if self.accelerator.is_main_process:
            logger.warning("skipped step %d: %s (%s)", skipped.step.number, skipped.fault, advice)

    # ---- the run folder

    def _open(self, path: Path | None) -> None:
        """Resume from the checkpoint at `path`, or start a fresh run, and open the logs."""
        if path:
            self._restore(path)
        config, best = self.config, self.method.keeps_best
        count = -(-(self.feed.steps - self.step) // config.checkpoint_every) + best
        check_space(self.out, self.model, min(count, config.keep_checkpoints + 1))
        if self.accelerator.is_main_process:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            save(config, self.out / "config.yaml")
        self.record.truncate(self.step if path else None)
        if config.report_to:
            self.record.start_trackers(config, new=path is None)

    def _restore(self, path: Path) -> None:
        saved = checkpoint.read_progress(path)["fingerprint"]
        check_fingerprint(saved, self.fingerprint, self.config.ignore_input_changes)
        progress = checkpoint.load(path, self.model, self.optimizer, self._tracked())
        self.step, self.tokens = progress["step"], progress["tokens"]
        self.state = progress["method"]
        evaluations = [  # without the keys that do not change the accuracy
            config["eval"] | {"every": 0, "batch": 0, "tasks": {}}
            for config in (progress["config"], dump(self.config))
        ]
        old, new = json.loads(json.dumps(evaluations))
        self.best = progress["best"] if old == new else {}
        self.mix = Mix(*progress["mix"])
        self.ended, self.evaluated = progress["ended"], progress["evaluated"]
        self.guard.load_state_dict(progress["guard"])
        self.feed.load_state_dict(progress)
        logger.info("resumed from %s", path)

    def _tracked(self) -> dict[str, torch.Tensor]:
        """The run's tensors besides model and optimizer: averages of gradients and weights."""
        average = {} if self.teacher is None else self.teacher.average
        return self.gradients.tracked | {f"teacher.{name}": x for name, x in average.items()}

    def save(self) -> None:
        """Write a checkpoint, and delete the oldest beyond `keep_checkpoints`."""
        progress = {
            "method": self.state,
            "mix": list(self.mix),
            "tokens": self.tokens,
            "ended": self.ended,
            "evaluated": self.evaluated,
            **self.feed.state_dict(),
            "guard": self.guard.state_dict(),
            "best": self.best,
            "fingerprint": self.fingerprint,
            "config": dump(self.config),
            "ranks": self.accelerator.num_processes,
            "format": FORMAT,
        }
        checkpoint.save(
            self.checkpoints,
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            progress=progress,
            extra_tensors=self._tracked(),
        )
        checkpoint.prune(self.checkpoints, self.config.keep_checkpoints, self.best.get("step"))


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate at optimizer step `step` (from 0) of `steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min((step - config.warmup_steps) / max(steps - 1 - config.warmup_steps, 1), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    low = config.lr * config.min_lr_ratio
    return low + (config.lr - low) * shape
