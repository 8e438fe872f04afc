"""Selects each step's prompts and demonstrations: datasets, their order, and this rank's part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac import collectives
from gac.data import Example, Examples, load_demos, load_prompts
from gac.data.examples import prompt_order, row_order
from gac.data.micro_batches import assign_rows, demo_row
from gac.imports import user_code
from gac.order import MixedOrder, Order
from gac.rows import Row
from gac.train_config import TrainConfig, plan_of
from gac.training.check import check_demos
from gac.training.startup import check_budget, check_positions, check_tokens
from gac.types import StepNeeds


class Feed:
    """The data of a run on one of `ranks` processes, with the position in each of `orders`.

    steps: number of optimizer steps of the run, after the method's limit on epochs.
    balances: whether rows are moved between ranks, so that each has as many tokens.
    """

    def __init__(
        self, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, rank: int, ranks: int
    ) -> None:
        self.method, self.steps = config.method, config.steps
        self.prompt_batch = config.rollouts.num_prompts
        self.demo_batch_size = config.demo_batch_size
        self.rank, self.ranks, self.tokenizer = rank, ranks, tokenizer
        self.own = slice(rank, None, ranks)
        self.names_sources = config.data.source_field is not None or bool(config.data.sources)
        self.order_name = config.data.order
        self.orders: dict[str, Order | MixedOrder] = {}
        needs = StepNeeds.union(map(self.method.needs, range(config.steps)))
        self.plan = plan_of(config)
        self.trains_on_prompt_demos = self.plan.demos == "prompt"
        self.separate_demos = needs.demos and not self.trains_on_prompt_demos
        self.step = 0  # of the last sampling
        self.before: tuple[int, dict[str, Any]] = (-1, {})  # a step, and the positions before it
        self.collected: list[int] = []  # indices of prompts with collected demonstrations
        # number of rows that stay on one rank
        self.unit = self.plan.unit(config.rollouts.num_generations)
        # no balancing if the gradients of several parts of each rank's rows are compared
        self.may_balance = ranks > 1 and needs.parts < 2
        self.balances = config.max_tokens_per_micro_batch is not None and self.may_balance
        check_demos(config, anywhere=True)
        if needs.rollouts:
            own = needs.demos and config.data.demos is None
            of_prompts = own or self.plan.teacher or self.trains_on_prompt_demos
            self.prompts = load_prompts(config.data, tokenizer, training=True, demos=of_prompts)
            self.prompt_order = prompt_order(config.data, self.prompts, config.seed)
            self.orders["prompt_order"] = self.prompt_order
            if self.plan.has_prefix and self.prompts.turns:
                raise ValueError(
                    f"method={self.method.name!r} continues prefixes of demonstrations: use "
                    "another one, because some demonstrations have several turns"
                )
            _check_divisible("rollouts.num_prompts", self.prompt_batch, ranks, needs.parts)
        reads_prompt_demos = self.plan.teacher or (needs.demos and self.trains_on_prompt_demos)
        if reads_prompt_demos and not any(self.prompts.demos):
            raise ValueError(
                f"data.max_demo_tokens={config.data.max_demo_tokens}: all demonstrations are "
                "longer: use a larger number"
            )
        if self.separate_demos:
            same = needs.rollouts and config.data.demos is None  # rows that are tokenized already
            rows = [i for i, tokens in enumerate(self.prompts.demos) if tokens] if same else []
            self.demos = self.prompts.subset(rows) if rows else load_demos(config.data, tokenizer)
            if self.plan.limit_demos is not None:
                self.demos = self.demos.subset(range(len(self.demos))[: self.plan.limit_demos])
            if self.plan.epochs is not None:
                epoch_steps = max(self.plan.epochs * len(self.demos) // self.demo_batch_size, 1)
                self.steps = min(config.steps, epoch_steps)
            self.demo_order = row_order(config.data, self.demos, config.seed + 1)
            self.orders["demo_order"] = self.demo_order
            _check_divisible("demo_batch_size", self.demo_batch_size, ranks, needs.parts)

    def examples(self, step: int) -> list[Example]:
        """This rank's prompts for the next sampling; `step` must not decrease."""
        self.step = step
        return self._next(self.prompt_order, self.prompts, self.prompt_batch, step)[self.own]

    def more_examples(self, number: int) -> list[Example]:
        """This rank's next `number` prompts; every rank calls it, with its own number."""
        numbers = collectives.gather(number)
        before = sum(numbers[: self.rank])
        examples = self._next(self.prompt_order, self.prompts, sum(numbers), self.step)
        return examples[before : before + number]

    def demo_rows(self, step: int, collected: Sequence[Example | None] = ()) -> list[Row]:
        """This rank's demonstrations for `step`, from the separate set or from the collection.

        collected: see `Rollouts.collected`; added to the collection first. Every rank calls it.
        """
        if self.separate_demos:
            examples = self._next(self.demo_order, self.demos, self.demo_batch_size, step)
        else:
            examples = self._collected(collected) if collected else []
        rows = [demo_row(example, self.plan.demo_tokens) for example in examples]
        if self.balances:
            return assign_rows(rows, self.ranks, self.unit)[self.rank]
        return rows[self.own]

    def _next(
        self, order: Order | MixedOrder, source: Sequence[Example], number: int, step: int
    ) -> list[Example]:
        """The next `number` examples of `source`, the same on every rank."""
        name = self.order_name
        with nullcontext() if name is None else user_code(f"data.order={name!r}"):
            if step != self.before[0]:
                self.before = step, self.state_dict()
            return [source[i] for i in order.take(number, step)]

    def _collected(self, examples: Sequence[Example | None]) -> list[Example]:
        """The newest examples of the collection once there are enough of them, else none."""
        by_rank = collectives.gather([e and e.index for e in examples])
        turns = itertools.zip_longest(*by_rank)  # the order of a single process
        self.collected += [i for turn in turns for i in turn if i is not None]
        size = self.plan.collect
        if len(self.collected) < size:
            return []
        newest, self.collected = self.collected[-size:], self.collected[:-size]
        return [self.prompts[i] for i in newest]

    def check_budgets(self, config: TrainConfig) -> int:
        """Check the rows' tokens; return the maximum length of a prompt with its response.

        Raises ConfigError if a row of the run may exceed the budget of generation or the model's
        positions, or has a token that is not in the model's vocabulary.
        """
        check_tokens(config.model, self.tokenizer, self.sources().values())
        rollouts = config.rollouts
        keys = "rollouts.max_completion_length, data.max_prompt_tokens or data.max_demo_tokens"
        check_positions(config.model, self.longest_row(rollouts.max_completion_length), keys)
        longest = self.longest_start() + rollouts.max_completion_length
        check_budget(rollouts.generation_batch_tokens, longest, rollouts.num_generations)
        return longest

    def longest_start(self) -> int:
        """Maximum number of tokens before a response: the prompt and any demonstration prefix."""
        if "prompt_order" not in self.orders:
            return 0
        return self.prompts.longest(1, self.plan.has_prefix)

    def longest_row(self, response: int) -> int:
        """Maximum row length in the run, with responses of at most `response` tokens."""
        lengths = [self.longest_start() + response if "prompt_order" in self.orders else 0]
        if self.plan.teacher:
            lengths.append(self.prompts.longest(2) + response)
        if self.trains_on_prompt_demos:
            lengths.append(self.prompts.longest())
        if self.separate_demos:
            lengths.append(self.demos.longest())
        return max(lengths)

    def sources(self) -> dict[str, Examples]:
        """The prompts, if any are sampled, and the separate demonstrations, if any."""
        prompts = {"prompts": self.prompts} if "prompt_order" in self.orders else {}
        return prompts | ({"demonstrations": self.demos} if self.separate_demos else {})

    def state_dict(self) -> dict[str, Any]:
        """State in plain JSON types."""
        state: dict[str, Any] = {name: order.state_dict() for name, order in self.orders.items()}
        return {**state, "collected": list(self.collected)} if self.plan.collect else state

    def undo(self, step: int) -> None:
        """Restore the positions from before `step`, if it has taken rows."""
        if step == self.before[0]:
            self.load_state_dict(self.before[1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the positions from `state`; orders that are not in it start at the beginning."""
        for name, order in self.orders.items():
            if name in state:
                order.load_state_dict(state[name])
        self.collected = list(state.get("collected", []))


def _check_divisible(name: str, value: int, ranks: int, parts: int) -> None:
    """Raise ValueError unless every rank gets equal `parts`, whose gradients are compared."""
    if value % (ranks * max(parts, 1)):
        factors = f"{ranks}, times the number of gradient parts, {parts}" if parts > 1 else ranks
        raise ValueError(f"{name}={value}: use a multiple of the number of processes, {factors}")
