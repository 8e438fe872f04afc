"""A training run: its parts, built from the configuration, and its checkpoints."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from gac.config import dump, save
from gac.evaluation.during import Evaluator
from gac.faults import checkpoint, preflight
from gac.faults.guard import Guard
from gac.faults.heartbeat import Heartbeat
from gac.faults.stopping import StopRequest
from gac.methods import Mix, Observation
from gac.methods.base import StepNeeds, next_mix
from gac.models.causal_lm import load_tokenizer, stop_tokens
from gac.parallel import setup
from gac.rewards import Tally, build_reward
from gac.rollouts.config import RolloutConfig
from gac.rollouts.engines import make_engine
from gac.rollouts.sampling import Rollouts, Sampler
from gac.training.feed import Feed
from gac.training.run_config import TrainConfig

from .budget import choose_micro_batches
from .fingerprint import check_fingerprint, fingerprint
from .optim import make_optimizer
from .policy import load_policy, load_reference, loss_of, make_gradients
from .record import Record

logger = logging.getLogger(__name__)
_MICRO = ("micro_batch_size", "max_tokens_per_micro_batch")


class Run:
    """The parts of a run, restored from its last checkpoint if there is one.

    State between steps: the step, the method's state, the mix of the next step, the data positions.
    """

    def __init__(self, config: TrainConfig, resume: bool = True) -> None:
        self.config, self.method = config, config.method
        self.out = Path(config.out)
        self.checkpoints = self.out / "checkpoints"
        self.accelerator = setup.make_accelerator(
            config.parallel, config.mixed_precision, config.report_to, config.out
        )
        self.heartbeat = Heartbeat()
        self.record = Record(self.out, self.accelerator)
        path = self._find_checkpoint(resume)
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        # fail early on invalid stop strings
        stop_tokens(self.tokenizer, (*config.rollouts.stop, *config.eval.stop))
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.feed = Feed(config, self.tokenizer, rank, ranks)
        self.plan = self.method.sampling(config.rollouts.num_generations)
        longest = self.feed.check_budgets(config)
        self.kl_in_loss = loss_of(config).spec.kl_coef != 0
        needs = StepNeeds.union(map(self.needs, range(config.steps)))
        # without rollouts, no server is contacted
        rollout_config = config.rollouts if needs.rollouts else RolloutConfig()
        engine = make_engine(
            rollout_config,
            self.tokenizer,
            served=config.model.path,
            longest=longest,
            folder=self.out,
        )
        self.model = load_policy(config, self.accelerator)
        self.policy = self.accelerator.unwrap_model(self.model)
        self.reference = load_reference(config, self.accelerator, needs.kl)
        self.config = config = choose_micro_batches(
            config,
            self.accelerator,
            self.model,
            self.reference,
            self.feed.longest_row(config.rollouts.max_completion_length),
            self.feed.unit,
        )
        self.feed.sized_in_tokens = config.max_tokens_per_micro_batch is not None
        self.optimizer = make_optimizer(self.model, config.optim)
        self.gradients = make_gradients(
            config, self.accelerator, self.tokenizer, self.model, self.reference, needs
        )
        reward = build_reward(config.reward)
        self.sampler = Sampler(
            config.rollouts,
            engine,
            self.tokenizer,
            reward,
            self.plan,
            self.method.credit,
            self.feed.more_examples,
        )
        self.rollouts: Rollouts | None = None
        self.tally = Tally(reward)
        self.evaluator = Evaluator(config.eval, self.tokenizer, reward, config.seed)
        self.step = 0
        self.state, self.mix = next_mix(self.method, self.method.init(), Observation(0))
        self.ended = False  # the method has ended the run
        self.guard, self.stop = Guard(config.guards), StopRequest()
        self.fingerprint = fingerprint(config.model, self.tokenizer, self.feed.sources(), reward)
        self.best: dict[str, Any] = {}  # step and accuracy of the best checkpoint
        self.first_skipped: Path | None = None  # first of the current consecutive skipped steps
        self._open(path)

    def needs(self, step: int) -> StepNeeds:
        """The method's needs for a step, plus the KL if the loss or the monitoring needs it."""
        needs, every = self.method.needs(step), self.config.monitor_kl_every
        monitored = needs.rollouts and every > 0 and step % every == 0
        return needs._replace(
            kl=self.kl_in_loss or monitored or (needs.kl and needs.rollouts),
            sources=self.feed.names_sources and needs.demos,
        )

    def _find_checkpoint(self, resume: bool) -> Path | None:
        """Find the checkpoint to resume from; fail early if the run cannot start.

        A resumed run keeps its micro-batches, unless the configuration sets others.
        """
        preflight.check_folder(self.out)
        path = checkpoint.newest(self.checkpoints)
        if path and not resume:
            raise ValueError(
                f"out={str(self.out)!r} already holds a run: resume it, or choose another directory"
            )
        if path:
            progress = checkpoint.read_progress(path)
            preflight.check_same_run(
                progress, dump(self.config), self.config.parallel.allow_world_size_change
            )
            if (
                self.config.micro_batch_size is None
                and self.config.max_tokens_per_micro_batch is None
            ):
                saved = {key: progress["config"].get(key) for key in _MICRO}
                self.config = dataclasses.replace(self.config, **saved)
        return path

    def _open(self, path: Path | None) -> None:
        """Resume from the checkpoint at `path`, or start a fresh run, and open the logs."""
        if path:
            self._restore(path)
        config = self.config
        remaining = -(-(self.feed.steps - self.step) // config.checkpoint_every)
        preflight.check_space(self.out, self.model, min(remaining, config.keep_checkpoints + 1))
        if self.accelerator.is_main_process:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            save(config, self.out / "config.yaml")
        self.record.truncate(self.step if path else None)
        if config.report_to:
            self.accelerator.init_trackers(self.out.name, config={"config": str(dump(config))})

    def _restore(self, path: Path) -> None:
        saved = checkpoint.read_progress(path).get("fingerprint")
        check_fingerprint(saved, self.fingerprint, self.config.ignore_input_changes)
        progress = checkpoint.load(path, self.model, self.optimizer, self.gradients.tracked)
        self.step, self.state, self.best = progress["step"], progress["method"], progress["best"]
        self.mix = Mix(*progress["mix"])
        self.ended = progress["ended"]
        self.guard.load_state_dict(progress["guard"])
        self.feed.load_state_dict(progress)
        logger.info("resumed from %s", path)

    def save(self) -> None:
        """Write a checkpoint, and delete the oldest beyond `keep_checkpoints`."""
        progress = {
            "method": self.state,
            "mix": list(self.mix),
            "ended": self.ended,
            **self.feed.state_dict(),
            "guard": self.guard.state_dict(),
            "best": self.best,
            "fingerprint": self.fingerprint,
            "config": dump(self.config),
            "ranks": self.accelerator.num_processes,
            "format": preflight.FORMAT,
        }
        checkpoint.save(
            self.checkpoints,
            self.step,
            self.model,
            self.optimizer,
            progress,
            self.gradients.tracked,
        )
        checkpoint.prune(self.checkpoints, self.config.keep_checkpoints, self.best.get("step"))
