"""Engines that sample rollouts: static or continuous batches, vLLM, or the run's own function."""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import ContinuousBatchingConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac import collectives
from gac.errors import RunError, UserError, import_extra
from gac.imports import load_object, user_code
from gac.models.sampling_mode import sampling_mode
from gac.types import Rollout

from .config import PagedConfig, RolloutConfig
from .generation import (
    Completion,
    SamplingParams,
    generate,
    generation_config,
    head_size,
    lacking_ids,
    stop_tokens,
)

if TYPE_CHECKING:
    from gac.data import Example


class RolloutFunction:
    """The function `package.module:function` that samples the rollouts of a run.

    It is called as `function(prompts, engine)` with a list of `Example`s, in which each prompt
    occurs `num_generations` times in a row, and returns one `Rollout` for each, in order.
    Completions are cut at `max_completion_length` tokens.
    """

    def __init__(self, name: str, key: str = "rollouts.function") -> None:
        self.where, self.function = f"{key}={name!r}", load_object(name, key)

    def __call__(self, prompts: Sequence[Example], engine: Any) -> list[Rollout]:
        """The rollouts, converted to tuples; `loss_mask` is () if every token has a loss.

        Raises:
            RunError: the function raised, or returned something else.
        """
        with user_code(self.where):
            rollouts: Any = self.function(list(prompts), engine)
        if not isinstance(rollouts, list | tuple) or len(rollouts) != len(prompts):
            size = f" of {len(rollouts)}" if isinstance(rollouts, list | tuple) else ""
            raise RunError(
                f"{self.where} returned a {type(rollouts).__name__}{size} for {len(prompts)} "
                "prompts: return a list with one Rollout per prompt, in order"
            )
        limit = engine.params.max_completion_length
        return [
            self._checked(i, rollout, engine.vocab_size, limit)
            for i, rollout in enumerate(rollouts)
        ]

    def _checked(self, i: int, rollout: Any, vocab_size: int, limit: int) -> Rollout:
        def require(valid: bool, name: str, value: Any, fix: str) -> None:
            if not valid:
                raise RunError(f"{self.where}: rollout {i} has {name}={value!r:.100}: {fix}")

        if not isinstance(rollout, Rollout):
            raise RunError(
                f"{self.where}: rollout {i} is a {type(rollout).__name__}: return "
                "gac.rollouts.Rollout objects"
            )

        def convert(name: str, kind: Callable[[Any], Any], fix: str) -> tuple[Any, ...]:
            value = getattr(rollout, name)
            try:
                return tuple(map(kind, value.tolist() if hasattr(value, "tolist") else value))
            except (TypeError, ValueError):
                raise RunError(
                    f"{self.where}: rollout {i} has {name}={value!r:.100}: {fix}"
                ) from None

        prompt, completion = (
            convert(name, operator.index, "give a list of token ids")
            for name in ("prompt_ids", "completion_ids")
        )
        for name, ids in (("prompt_ids", prompt), ("completion_ids", completion)):
            require(len(ids) > 0, name, ids, "give at least one token")
            bad = next((t for t in ids if not 0 <= t < vocab_size), None)
            fix = f"{bad} is not a token of the model, which has {vocab_size}"
            require(bad is None, name, ids, fix)
        size = len(completion)
        one_each = f"give one number for each of the {size} completion_ids"
        mask = convert("loss_mask", operator.index, "use a list of 0 and 1")
        require(len(mask) == size, "loss_mask", mask, one_each)
        require(set(mask) <= {0, 1}, "loss_mask", mask, "use 0 and 1")
        logps = None
        if rollout.logps is not None:
            logps = convert("logps", float, "give a list of numbers, or None")
            require(len(logps) == size, "logps", logps, one_each)
            own = [x for x, learned in zip(logps, mask, strict=True) if learned]
            require(not any(x > 0 for x in own), "logps", logps, "use log-probabilities, <= 0")
        reward = rollout.reward
        valid = reward is None or (isinstance(reward, Real) and math.isfinite(reward))
        require(valid, "reward", reward, "use a finite number, or None")
        extra = rollout.extra
        require(isinstance(extra, Mapping), "extra", extra, "use a dict")
        return replace(
            rollout,
            prompt_ids=prompt,
            completion_ids=completion[:limit],
            loss_mask=() if all(mask) else tuple(map(bool, mask[:limit])),
            logps=logps and logps[:limit],
        )


CPU_BATCH = 256  # tokens per forward on a CPU
Result = TypeVar("Result")


class Engine:
    """Samples from the model that was loaded last, with the engine selected by `config`.

    A server is contacted immediately.

    Args:
        config: the `rollouts` section of the configuration.
        tokenizer: the model's tokenizer.
        served: the model that a server must serve.
        longest: maximum length of a prompt with its completion.
        folder: folder for a server's weights, unless `config` sets one.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        served: str = "",
        longest: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.params = SamplingParams(
            config.max_completion_length, config.temperature, config.top_p, stop=config.stop
        )
        self.function = None if config.function is None else RolloutFunction(config.function)
        self.evaluates = False  # whether the responses are those of an evaluation
        self.vocab_size = len(tokenizer)  # until the first `load`; the model's may be larger
        self.model: Any = None
        self._server: Any = None
        self._independent = False
        if config.engine == "vllm":
            module = import_extra("gac.rollouts.vllm", "rollouts.engine=vllm")
            self._server = module.Servers(config.vllm, tokenizer, served, longest, folder)

    def load(self, model: Any) -> Engine:
        """Sample with the current weights of `model` from now on. Call it on every rank."""
        self.model = model
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        if self._server is not None:
            self._server.load(model)
        return self

    def for_evaluation(self, params: SamplingParams, function: RolloutFunction | None) -> Engine:
        """The same engine with the parameters and the function of an evaluation."""
        other = copy.copy(self)
        other.params, other.function, other.evaluates = params, function, True
        return other

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], num_generations: int = 1, **changes: Any
    ) -> list[Completion]:
        """Sample `num_generations` completions of each prompt, in order.

        Args:
            prompt_ids: token ids of each prompt.
            num_generations: completions per prompt.
            changes: replace the run's `max_completion_length`, `temperature`, `top_p` or `stop`.

        Returns:
            Token ids up to and including the stop token. `.logps` are their log-probs if a server
            sampled them, else ().
        """
        params = self.params._replace(num_generations=num_generations, **changes)
        if self._independent:
            collectives.largest([1.0])  # ranks that have finished sample with this one
        return self._sample([tuple(prompt) for prompt in prompt_ids], params)

    def roll_out(self, examples: Sequence[Example], num_generations: int) -> list[Rollout]:
        """`num_generations` rollouts of each example, in order. Call it on every rank."""
        if self.function is None:
            return self.sample_rollouts(examples, num_generations)
        return self.independently(lambda: self.sample_rollouts(examples, num_generations))

    def sample_rollouts(self, examples: Sequence[Example], num_generations: int) -> list[Rollout]:
        """`roll_out` inside `independently`."""
        owners = [example for example in examples for _ in range(num_generations)]
        if self.function is not None:
            return self.function(owners, self) if owners else []
        completions = self.generate([e.prompt for e in examples], num_generations)
        return [
            Rollout(example.prompt, tuple(completion), (), completion.logps or None)
            for example, completion in zip(owners, completions, strict=True)
        ]

    def independently(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which may call `generate` a different number of times on each rank.

        Sampling from sharded weights or a server needs all ranks, so those that have finished take
        part in the other ranks' calls without prompts. An error on one rank is raised on all.
        """

        def joined() -> Result:
            with self._joining():
                return work()

        return collectives.run_on_all_ranks(joined)

    @contextlib.contextmanager
    def _joining(self) -> Iterator[None]:
        self._independent, errors = True, []
        try:
            yield
        finally:
            self._independent = False
            while collectives.largest([0.0])[0]:
                try:
                    self._sample([], self.params)
                except UserError as error:  # raised on all ranks
                    errors.append(error)
        if errors:
            raise errors[0]

    def _sample(self, prompts: list[tuple[int, ...]], params: SamplingParams) -> list[Completion]:
        if self._server is not None:
            return self._server.generate(prompts, params)
        if self.config.engine == "paged":
            return _generate_paged(self.model, self.tokenizer, prompts, params, self.config.paged)
        return generate(
            self.model,
            self.tokenizer,
            prompts,
            batch=self.config.generation_batch_size,
            batch_tokens=self.config.generation_batch_tokens,
            **params._asdict(),
        )


@torch.no_grad()
def _generate_paged(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    config: PagedConfig,
) -> list[Completion]:
    """Sample with transformers' continuous batching, in which no rollout waits for the longest.

    This rank must have the full model. The seed is drawn from torch's generator. Raises RunError if
    a completion is missing.
    """
    if not prompts:
        return []
    stops = stop_tokens(tokenizer, params.stop)
    lacking = lacking_ids(tokenizer, head_size(model))
    settings = generation_config(params, stops, tokenizer.pad_token_id, lacking)
    # on a CPU, transformers would take most of the memory: allow only what all completions need
    on_cpu = next(model.parameters()).device.type == "cpu"
    blocks = params.num_generations * sum(
        -(-(len(prompt) + params.max_completion_length) // config.block_size) for prompt in prompts
    )
    pages = ContinuousBatchingConfig(
        max_batch_tokens=config.max_batch_tokens or (CPU_BATCH if on_cpu else None),
        num_blocks=config.num_blocks or (blocks if on_cpu else None),
        block_size=config.block_size,
        seed=int(torch.randint(2**31, ())),
        auto_switch_to_flash=False,  # the same attention as in training
    )
    with sampling_mode(model):
        results = model.generate_batch(
            [list(p) for p in prompts], generation_config=settings, continuous_batching_config=pages
        )
    errors = [r.error for r in results.values() if r.error is not None]
    expected = len(prompts) * params.num_generations
    if errors or len(results) != expected:
        count = len(results) - len(errors)
        cause = f" ({errors[0]})" if errors else ""
        raise RunError(
            f"rollouts.engine=paged: only {count} of {expected} completions were generated{cause}: "
            "lower rollouts.paged.max_batch_tokens or num_blocks, or use rollouts.engine=generate; "
            "then rerun the command to resume from the last checkpoint"
        )
    # results are in prompt order; within a request, the child samples precede their parent
    return [Completion(r.generated_tokens) for r in results.values()]
