"""Selects each step's prompts and demonstrations: datasets, their order, this rank's share."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.data.balance import exchanged, shares
from gac.data.examples import Example, Order, load_demos, load_prompts
from gac.data.rows import Row, demo_row
from gac.data.shift import ShiftingOrder
from gac.faults.preflight import check_budget
from gac.methods.base import Needs
from gac.training.run_config import TrainConfig


class Feed:
    """The data of a run on one of `ranks` processes; its state is the position in each order.

    steps: optimizer steps of the run, after the method's limit on epochs.
    """

    def __init__(
        self, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, rank: int, ranks: int
    ) -> None:
        self.method, self.steps = config.method, config.steps
        self.batch, self.prompt_batch = config.demo_batch, config.rollouts.prompts
        self.rank, self.ranks = rank, ranks
        self.share = slice(rank, None, ranks)
        self.orders: dict[str, Order | ShiftingOrder] = {}
        needs = Needs.union(map(self.method.needs, range(config.steps)))
        sampling = self.method.sampling(config.rollouts.completions)
        self.demo_tokens, self.apart = sampling.demo_tokens, False
        self.shows = sampling.demos == "prompt"
        self.continues = any(stage.prefix for stage in sampling.stages)
        self.together = 1 + sampling.pairs
        # no balancing if the gradients of several parts of each rank's rows are compared
        self.balances = config.micro_tokens is not None and ranks > 1 and needs.parts < 2
        if needs.rollouts:
            self.prompts = load_prompts(config.data, tokenizer, training=True)
            self.prompt_order = Order(len(self.prompts), config.seed)
            self.orders["prompt_order"] = self.prompt_order
            _divides("rollouts.prompts", self.prompt_batch, ranks)
        if not needs.demos:
            return
        if sampling.demos == "prompt" and not any(e.demo for e in self.prompts):
            raise ValueError(
                f"data.prompts={config.data.prompts!r}: method {self.method.name!r} learns from "
                "the demonstrations of the sampled prompts; give rows with a field "
                f"{config.data.demo_field!r} (data.demo_field)"
            )
        shifts = config.data.demo_shifts or ()
        if sampling.demos == "prompt" and shifts:
            raise ValueError(
                f"data.demo_shifts: method {self.method.name!r} trains on the demonstrations of the sampled prompts and does not support demo_shifts; choose another method"
            )
        if sampling.demos == "apart":
            self.apart = True
            later = [dataclasses.replace(config.data, demos=shift.demos) for shift in shifts]
            found = [load_demos(data, tokenizer) for data in (config.data, *later)]
            self.demos = [demos[: sampling.limit_demos] for demos in found]
            if sampling.epochs is not None:
                enough = max(sampling.epochs * len(self.demos[0]) // self.batch, 1)
                self.steps = min(config.steps, enough)
            starts, sizes = [0, *(shift.step for shift in shifts)], list(map(len, self.demos))
            self.demo_order = ShiftingOrder(starts, sizes, config.seed + 1)
            self.orders["demo_order"] = self.demo_order
            _divides("demo_batch", self.batch, ranks)

    def examples(self) -> list[Example]:
        """This rank's prompts for the next sampling."""
        taken = self.prompt_order.take(self.prompt_batch)
        return [self.prompts[i] for i in taken[self.share]]

    def demo_rows(self, step: int) -> list[Row]:
        """This rank's demonstrations for `step`, if they come from a separate set; otherwise none."""
        if not (self.apart and self.method.needs(step).demos):
            return []
        taken = self.demo_order.take(step, self.batch)
        rows = [demo_row(self.demos[which][i], self.demo_tokens) for which, i in taken]
        if self.balances:  # every rank has all of them already
            return shares(rows, self.ranks, self.together)[self.rank]
        return rows[self.share]

    def balanced(self, rollouts: list[Row]) -> list[Row]:
        """This rank's rollouts, rebalanced across ranks by tokens if micro-batches are sized in
        tokens.
        """
        return exchanged(rollouts, self.together) if self.balances else rollouts

    def check_budgets(self, config: TrainConfig) -> int:
        """Maximum length of a prompt with its response. Raises ConfigError if a row of the run may
        exceed a token budget.
        """
        rollouts = config.rollouts
        row = self.longest_row(rollouts.max_new_tokens)
        check_budget("micro_tokens", config.micro_tokens, row, self.together)
        drawn = self.longest_start() + rollouts.max_new_tokens
        tokens, together = rollouts.batch_tokens, rollouts.completions
        check_budget("rollouts.batch_tokens", tokens, drawn, together)
        return drawn

    def longest_start(self) -> int:
        """Maximum number of tokens before a response: a prompt and, if prefixes are used, its
        demonstration.
        """
        if "prompt_order" not in self.orders:
            return 0
        return max(len(e.prompt) + self.continues * len(e.demo or ()) for e in self.prompts)

    def longest_row(self, response: int) -> int:
        """Maximum row length in the run, with responses of at most `response` tokens."""
        lengths = [self.longest_start() + response if "prompt_order" in self.orders else 0]
        shown = [self.prompts] if self.shows else []
        for examples in shown + (self.demos if self.apart else []):
            lengths += [len(e.prompt) + len(e.demo or ()) for e in examples]
        return max(lengths)

    def state_dict(self) -> dict[str, Any]:
        """State in plain JSON types."""
        return {name: order.state_dict() for name, order in self.orders.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`; orders that it does not name start from the beginning."""
        for name, order in self.orders.items():
            if name in state:
                order.load_state_dict(state[name])


def _divides(name: str, value: int, ranks: int) -> None:
    if value % ranks:
        raise ValueError(f"{name}={value}: use a multiple of the number of processes, {ranks}")
