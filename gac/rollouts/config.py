"""The keys of `rollouts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gac.errors import require
from gac.fields import (
    Checked,
    Count,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    expand_paths,
    number,
    one_of,
    require_default,
    setting,
)
from gac_kernels.contract import CHOICES, MAX_PROBABILITY_DIFFERENCE

ENGINE = one_of("generate", "paged", "vllm")


@dataclass(frozen=True)
class PagedConfig(Checked):
    """Settings of the cache of the `paged` engine."""

    max_batch_tokens: Count | None = None
    """Tokens per forward; null: chosen from the free GPU memory, 256 on a CPU."""
    num_blocks: Count | None = None
    """Blocks of the cache, with one page per layer each; null: chosen from the free GPU memory or,
    on a CPU, enough for all completions.
    """
    block_size: Annotated[int, number("an integer >= 4", lambda x: x >= 4)] = 256
    """Tokens per page, >= 4."""


@dataclass(frozen=True)
class VLLMConfig(Checked):
    """Settings of the `vllm` engine's servers, which are started separately from the trainer."""

    urls: tuple[str, ...] = ("http://localhost:8000",)
    """Base URL of each server. They share the prompts equally."""
    model: str | None = None
    """Name or folder of the served model, as the servers report it; null: `model.path`."""
    weights: Annotated[str, one_of("disk", "nccl")] = "disk"
    """How the servers receive the weights before each sampling. disk: through a folder shared with
    the trainer. nccl: by TRL's transfer between GPUs, to a single server, which needs vllm in the
    trainer's environment too."""
    folder: str | None = None
    """disk: the shared folder, under the same path for all, e.g. in /dev/shm; null: in the run
    directory."""
    timeout: Positive = 600.0
    """Request timeout in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expand_paths(self, "folder")
        valid = all(url.startswith(("http://", "https://")) for url in self.urls)
        use = "a list of URLs that begin with http:// or https://"
        require(bool(self.urls) and valid, "urls", list(self.urls), use)
        single = self.weights == "disk" or len(self.urls) == 1
        require(single, "weights", self.weights, "disk, because there are several urls")


STORED_PAIRS = "gac.rollouts.stored:stored_pairs"
"""The `function` that reads pairs of responses from the data."""


@dataclass(frozen=True)
class RolloutConfig(Checked):
    """How rollouts are sampled, how advantages are computed, and which samples are logged."""

    num_prompts: Count = 32
    """Prompts per optimizer step, over all ranks."""
    num_generations: Count = 8
    """Rollouts per prompt."""
    max_completion_length: Count = 1024
    """Maximum completion length, in tokens, over all turns."""
    temperature: Positive = 1.0
    """Sampling temperature, also used in the rollout loss."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling; below 1 the rollouts come from a truncated distribution, not from the
    policy in the loss."""
    stop: tuple[str, ...] = ()
    """Strings, each a single token, that end a completion in addition to the EOS token."""
    num_iterations: Count = 1
    """Optimizer steps per set of rollouts; above 1 the importance ratio and its clipping matter."""
    generation_batch_size: Count | None = setting(
        None, only_with="engine=generate", may_change=True
    )
    """Rollouts generated at once; null: all."""
    generation_batch_tokens: int | None = setting(
        None, only_with="engine=generate", may_change=True
    )
    """Token budget per generation batch, instead of `generation_batch_size`: groups prompts of
    similar length and counts each rollout as its padded prompt plus `max_completion_length`."""
    function: str | None = None
    """The run's own rollouts, e.g. several turns, tools or an environment:
    `package.module:function`, called with a list of prompts and the engine; returns one
    `gac.rollouts.Rollout` for each. null: one completion of each prompt."""
    engine: Annotated[str, one_of("generate", "paged", "vllm")] = setting(
        "generate", may_change=True
    )
    """generate: static batches, each of which runs until its longest completion ends; on a CPU, the
    rows that have ended are left out. paged: transformers' continuous batching, which starts a new
    completion whenever one ends. vllm: an external server (needs the extra `vllm`)."""
    paged: PagedConfig = setting(PagedConfig(), only_with="engine=paged", may_change=True)
    """Settings of the `paged` engine."""
    vllm: VLLMConfig = setting(VLLMConfig(), only_with="engine=vllm", may_change=True)
    """Settings of the `vllm` engine."""
    correction: Annotated[str, one_of(*CHOICES["correction"])] = setting(
        "sequence_mask", only_with="engine=vllm or function, temperature=1.0, top_p=1.0"
    )
    """Importance correction of rollouts from another engine (vllm), whose log-probs differ from the
    trainer's: token_truncate, token_mask, sequence_truncate, sequence_mask, probability_mask,
    probability_mask_away or none; see `loss.correction`."""
    correction_max: Positive = setting(
        3.0, only_with="engine=vllm or function, temperature=1.0, top_p=1.0"
    )
    """Upper bound of the importance factor: `*_mask` drops what is above, `*_truncate` caps it. For
    the masks by probabilities, their largest difference, at most 1; 3.0 means 0.3 there."""
    scale_rewards: Annotated[str, one_of("std", "centered", "batch")] = "std"
    """std: (r - mean) / (std + 1e-4) in the group; centered: r - mean; batch: (r - group mean)
    / (std of the batch + 1e-4)."""
    dynamic_sampling_retries: Natural = 0
    """Dynamic sampling (DAPO, arXiv 2503.14476): replace prompts whose rollouts all have the same
    reward, and hence no advantage, by the next prompts, at most this many times per step. Refused
    for methods that train on the demonstrations of these prompts, which still teach."""
    mask_truncated_completions: bool = False
    """Overlong filtering (DAPO): completions cut off at `max_completion_length` have no loss; their
    rewards still count in their group."""
    overlong_tokens: int | None = None
    """Soft overlong punishment (DAPO): over the last `overlong_tokens` tokens before
    `max_completion_length`, the reward falls linearly by up to `overlong_penalty`; null: off."""
    overlong_penalty: NonNegative = setting(1.0, only_with="overlong_tokens")
    """Largest reduction of the reward by `overlong_tokens`."""
    log_samples_every: Natural = setting(10, may_change=True)
    """Number of steps between the entries of samples.jsonl; 0: no entries."""
    log_sample_prompts: Natural = setting(2, only_with="log_samples_every", may_change=True)
    """Prompts per entry, each with all its completions and rewards."""
    print_samples: bool = setting(False, only_with="log_samples_every", may_change=True)
    """Also print these samples in the terminal."""

    @property
    def correction_bound(self) -> float:
        """`correction_max`, whose default depends on the correction."""
        is_default = self.correction_max == type(self).correction_max
        masks_probabilities = self.correction.startswith("probability")
        return (
            MAX_PROBABILITY_DIFFERENCE
            if masks_probabilities and is_default
            else self.correction_max
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.correction.startswith("probability") or self.correction_bound <= 1,
            "correction_max",
            self.correction_max,
            f"a difference of probabilities, at most 1, with correction={self.correction}",
        )
        minimum = self.num_generations * (self.max_completion_length + 1)
        require(
            self.overlong_tokens is None or 1 <= self.overlong_tokens <= self.max_completion_length,
            "overlong_tokens",
            self.overlong_tokens,
            f"a number from 1 to max_completion_length={self.max_completion_length}, or null",
        )
        if self.generation_batch_tokens is not None:
            size = "generation_batch_size"
            require_default(self, size, size, "with generation_batch_tokens")
            if self.generation_batch_tokens < minimum:
                raise ValueError(
                    f"generation_batch_tokens={self.generation_batch_tokens!r}: the "
                    f"{self.num_generations} rollouts of a prompt need at least {minimum} "
                    "tokens: use more, or null"
                )
