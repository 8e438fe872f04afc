"""Sampling from a policy with the engine `generate`.

Notation: Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
import torch.nn.functional as F
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac.collectives import largest
from gac.errors import ConfigError
from gac.models.chat import end_of_turn
from gac.models.sampling_mode import sampling_mode
from gac.parallel.sharding import in_lockstep

from .kv_cache import make_cache

logger = logging.getLogger(__name__)
ROUNDING = 0.05  # largest change by padding, relative to the effect of other tokens
LACKING = 0.01  # probability of ids without a token above which a warning is logged
SELECT_SHARE = 0.25  # share of ended rows at which the others continue, in a smaller cache
REREAD_SHARE = 0.5  # the same without a cache that can drop rows: the others are read again
REREAD_AFTER = 16  # tokens before the rows are read again
BLOCK = 256  # tokens of the vocabulary whose probabilities are summed first


class SamplingParams(NamedTuple):
    """Sampling parameters that all engines share."""

    max_completion_length: int
    temperature: float
    """0 means greedy decoding."""
    top_p: float = 1.0
    num_generations: int = 1
    """Completions per prompt."""
    stop: Sequence[str] = ()


class Completion(tuple[int, ...]):
    """Token ids of a completion, with their log-probs in the engine that sampled them."""

    logps: tuple[float, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int], logps: Sequence[float]) -> Completion:
        """Create a completion; `logps` is cut to the length of `tokens`."""
        completion = cls(tokens)
        completion.logps = tuple(logps[: len(tokens)])
        return completion


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, ...]],
    *,
    batch: int | None = None,
    batch_tokens: int | None = None,
    **keywords: Any,
) -> list[Completion]:
    """Sample completions of each prompt, in order; keywords as in `SamplingParams`.

    batch: completions generated at once; None: all. batch_tokens: see `RolloutConfig`.
    """
    params = SamplingParams(**keywords)
    stops = stop_tokens(tokenizer, params.stop)
    pad_token: int = tokenizer.pad_token_id
    lacking = lacking_ids(tokenizer, head_size(model))
    device = next(model.parameters()).device
    completions: list[list[Completion]] = [[] for _ in prompts]
    lockstep = in_lockstep(model)
    parts = _parts(prompts, params, batch, batch_tokens)
    if not _supports_padding(model, pad_token):
        parts = [part for mixed in parts for part in _equal_lengths(prompts, mixed)]
    calls, shortest = len(parts), min(map(len, prompts), default=2)
    reads_each = params.num_generations == 1 or shortest < 2
    if lockstep:  # the forwards must be the same on all ranks
        most = largest([calls, reads_each])
        calls, reads_each = int(most[0]), bool(most[1])
    batches = Batches(
        model,
        processors=_processors(params, lacking, model),
        stops=stops,
        pad_token=pad_token,
        lockstep=lockstep,
        reads_each=reads_each,
    )
    with sampling_mode(model):
        for part in parts + [[]] * (calls - len(parts)):
            texts = [prompts[i] for i in part] or [(stops[0],) * 2]
            missing = [max(map(len, texts)) - len(prompt) for prompt in texts]
            # left padding, because generation continues at the end
            padded = [(pad_token,) * n + prompt for n, prompt in zip(missing, texts, strict=True)]
            ids = torch.tensor(padded, device=device)
            width = torch.arange(ids.shape[1], device=device)
            mask = (width >= torch.tensor(missing, device=device)[:, None]).long()
            rows = batches.sample(ids, mask, params.num_generations, params.max_completion_length)
            new = [Completion(truncate_at_stop(row, stops)) for row in rows]
            for at, i in enumerate(part):
                count = params.num_generations
                completions[i] = new[at * count : (at + 1) * count]
    return [completion for group in completions for completion in group]


class Batches:
    """Samples batches of prompts with transformers' `generate`, and spares it needless work.

    Each prompt is read once for all of its samples. On a CPU, where the time of a step grows with
    the number of rows, rows that have ended leave the batch.

    Args:
        model: in sampling mode.
        processors: change the logits.
        stops: tokens that end a response.
        pad_token: fills the prompts on the left, and responses that have ended.
        lockstep: whether all ranks must run the same forwards.
        reads_each: read a prompt for each of its samples, for prompts of one token.
    """

    def __init__(
        self,
        model: Any,
        *,
        processors: LogitsProcessorList,
        stops: list[int],
        pad_token: int,
        lockstep: bool,
        reads_each: bool,
    ) -> None:
        self.model, self.processors, self.stops = model, processors, stops
        self.pad_token, self.lockstep, self.reads_each = pad_token, lockstep, reads_each

    def sample(
        self, ids: torch.Tensor, mask: torch.Tensor, samples: int, length: int
    ) -> list[list[int]]:
        """Up to `length` new tokens for each sample, at least up to the first stop token.

        ids, mask: [Q, T] prompts, padded on the left; the result has Q * `samples` rows.
        """
        cache = make_cache(self.model)
        if cache is not None and not self.reads_each:
            self._generate(ids[:, :-1], mask[:, :-1], 1, cache, LogitsProcessorList())
            cache.batch_repeat_interleave(samples)
        ids, mask = (x.repeat_interleave(samples, 0) for x in (ids, mask))
        new: list[list[int]] = [[] for _ in ids]
        live = list(range(len(ids)))
        leave = ids.device.type == "cpu" and not self.lockstep
        rule = (SELECT_SHARE, 1) if cache is not None else (REREAD_SHARE, REREAD_AFTER)
        while True:
            ended = Ended(self.stops, *rule) if leave else None
            out = self._generate(ids, mask, length, cache, self.processors, ended)
            tokens = out[:, ids.shape[1] :].tolist()
            for i, row in zip(live, tokens, strict=True):
                new[i] += row
            length -= len(tokens[0])
            if ended is None or not ended.stopped or not length:
                return new
            kept = (~ended.rows).nonzero().flatten()
            live = [live[i] for i in kept.tolist()]
            ids, mask = out[kept], mask[kept]
            mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
            if cache is not None:
                cache.batch_select_indices(kept)

    def _generate(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        length: int,
        cache: Cache | None,
        processors: LogitsProcessorList,
        ended: Ended | None = None,
    ) -> torch.Tensor:
        """`ids` with up to `length` new tokens; `cache` has none or some of the first tokens."""
        return self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            # the processors sample, and leave one token that is possible
            generation_config=GenerationConfig(
                max_new_tokens=length, eos_token_id=self.stops, pad_token_id=self.pad_token
            ),
            stopping_criteria=StoppingCriteriaList([] if ended is None else [ended]),
            logits_processor=processors,
            synced_gpus=self.lockstep,
            **({} if cache is None else {"past_key_values": cache}),
        )


class Ended(StoppingCriteria):
    """Stops a batch when a share of its rows has ended, but not all of them.

    Args:
        stops: tokens that end a row.
        share: the smallest share of the rows.
        after: the smallest number of steps.
    """

    def __init__(self, stops: Sequence[int], share: float, after: int) -> None:
        self.stops, self.share, self.after = torch.tensor(stops), share, after
        self.steps, self.stopped = 0, False
        self.rows = torch.tensor(False)  # [B]: whether the row has ended

    def __call__(self, input_ids: Any, scores: Any, **keywords: Any) -> Any:
        """[B]: whether to stop each row; the same value for all rows."""
        self.rows = self.rows | torch.isin(input_ids[:, -1], self.stops)
        self.steps += 1
        ended, count = int(self.rows.sum()), len(self.rows)
        self.stopped = self.steps >= self.after and self.share * count <= ended < count
        return torch.full_like(self.rows, self.stopped)


def _processors(params: SamplingParams, lacking: Sequence[int], model: Any) -> LogitsProcessorList:
    """What changes the logits of a new token: in the end, only the sampled one is possible."""
    processors: list[LogitsProcessor] = [LackingIds(lacking, model)] if lacking else []
    if params.temperature > 0:
        if params.temperature != 1:
            processors.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(params.top_p))
        processors.append(SampledToken())
    return LogitsProcessorList(processors)


class SampledToken(LogitsProcessor):
    """Samples a token of each row, and makes all others impossible.

    It draws one random number per row and inverts the distribution function: first that of blocks
    of tokens, then that within a block, with cumulative sums in float64. `torch.multinomial`, which
    transformers uses, draws one number for each token of the vocabulary; on a CPU that took a fifth
    of a step of a model with 49,152 tokens.
    """

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        """Logits [B, V]: 0 for the sampled token, and -inf for the others."""
        token = sampled(scores.softmax(-1))[:, None]
        return torch.full_like(scores, -math.inf).scatter_(1, token, 0)


def sampled(probabilities: torch.Tensor) -> torch.Tensor:
    """One index [B] from each row of probabilities [B, V], never one of probability 0.

    Raises RuntimeError if a row contains nan.
    """
    rows, vocabulary = probabilities.shape
    blocks = F.pad(probabilities, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    sums = blocks.sum(-1).double()
    draws = torch.rand(rows, 1, dtype=torch.float64, device=sums.device)
    block, rest = _invert(sums, draws * sums.sum(-1, keepdim=True))
    torch._assert_async(rest.isfinite().all(), "the model's logits contain nan or inf")
    values = blocks[torch.arange(rows, device=sums.device), block.squeeze(1)].double()
    token, _ = _invert(values, rest)
    return (block * BLOCK + token).squeeze(1)


def _invert(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the cumulative sum of the weights [B, M] exceeds a target [B, 1], and what is left.

    A target that rounding has made too large takes the last weight that is not 0.
    """
    ends = weights.cumsum(-1)
    last = ends[:, -1:]
    target = target.minimum(last.nextafter(torch.zeros_like(last)))
    index = torch.searchsorted(ends, target, right=True).clamp(max=weights.shape[1] - 1)
    return index, target - (ends - weights).gather(1, index).minimum(target)


class LackingIds(LogitsProcessor):
    """Masks the ids that the tokenizer lacks, whose text would be empty, so none is sampled.

    The log-probs in training include these ids, as those of any other program do, so that training
    keeps their probability near 0 in the exported model too. It is near 0 in a trained model; if it
    is not, a warning is logged, because the policy in the loss then differs from the sampled one.
    """

    measured: ClassVar[WeakSet[Any]] = WeakSet()
    """The models whose probabilities were measured: once is enough, because training lowers it."""

    def __init__(self, ids: Sequence[int], model: Any) -> None:
        self.ids, self.index, self.model = ids, torch.tensor(ids, dtype=torch.long), model

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Mask the logits [B, V] of these ids."""
        self.index = self.index.to(scores.device)
        if self.model not in self.measured:
            self.measured.add(self.model)
            lacking = float(scores.float().softmax(-1)[:, self.index].sum(-1).max())
            if lacking > LACKING:
                logger.warning(
                    "the model's head has %d ids that the tokenizer lacks, with a total "
                    "probability of up to %.2g for one token: they are not sampled, but the "
                    "log-probs in training include them; if the model is new, resize it with "
                    "model.resize_token_embeddings(len(tokenizer))",
                    len(self.ids),
                    lacking,
                )
        return scores.index_fill(-1, self.index, -math.inf)


def head_size(model: Any) -> int:
    """Number of ids in the model's head."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return model.config.get_text_config(decoder=True).vocab_size if weight is None else len(weight)


def lacking_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[int, ...]:
    """The ids below `size` that the tokenizer lacks, e.g. the padding of a head to a round size."""
    return _lacking_ids(tokenizer, size, len(tokenizer))


@functools.lru_cache(maxsize=8)
def _lacking_ids(tokenizer: PreTrainedTokenizerBase, size: int, _: int) -> tuple[int, ...]:
    return tuple(sorted({*range(size)} - {*tokenizer.get_vocab().values()}))


def _parts(
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    batch: int | None,
    tokens: int | None,
) -> list[list[int]]:
    """Group prompts of similar length into generation batches, longest first.

    tokens: budget per batch, counting padded prompts and full-length completions; a batch has at
        least one prompt.
    """
    per_call = max((batch or len(prompts) * params.num_generations) // params.num_generations, 1)
    if tokens is None and per_call >= len(prompts):
        return [list(range(len(prompts)))] if prompts else []
    parts: list[list[int]] = []
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        if not parts or len(parts[-1]) == per_call:
            parts.append([])
            # the longest prompt comes first, and the others are padded to it
            cost = params.num_generations * (len(prompts[i]) + params.max_completion_length)
            per_call = max(tokens // cost, 1) if tokens else per_call
        parts[-1].append(i)
    return parts


def _equal_lengths(prompts: Sequence[tuple[int, ...]], part: list[int]) -> list[list[int]]:
    """Split a generation batch into batches whose prompts need no padding."""
    by_length: dict[int, list[int]] = {}
    for i in part:
        by_length.setdefault(len(prompts[i]), []).append(i)
    return list(by_length.values())


def _supports_padding(model: Any, pad_token: int) -> bool:
    """Whether padding on the left leaves the next token's logits unchanged up to rounding.

    Some recurrent models read the padding. Tested once per model; call it on every rank.
    """
    if "supports_padding" in model.__dict__:
        return model.__dict__["supports_padding"]
    settings = GenerationConfig(max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    weight = model.get_input_embeddings().weight
    rows = torch.arange(12, device=weight.device).view(2, 6) % len(weight)
    mask = torch.ones_like(rows)
    rows[0, :3], mask[0, :3] = pad_token, 0

    def logits(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with sampling_mode(model):
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        return out.logits[0].float()

    padded, alone = logits(rows, mask), logits(rows[:1, 3:], mask[:1, 3:])
    effect = (padded[0] - padded[1]).abs().max()  # of other tokens; rounding is much smaller
    supported = bool((padded[0] - alone[0]).abs().max() <= ROUNDING * effect)
    model.__dict__["supports_padding"] = supported
    if not supported:
        logger.warning(
            "%s samples differently when a prompt is padded: generating prompts of equal length "
            "together, which is slower",
            type(model).__name__.removeprefix("FSDP"),
        )
    return supported


def generation_config(
    params: SamplingParams,
    stops: list[int],
    pad_token: int | None,
    suppressed: Sequence[int] = (),
) -> GenerationConfig:
    """Settings to sample from the policy itself: no top-k, no penalties.

    suppressed: ids that are never sampled.
    """
    sample = params.temperature > 0
    return GenerationConfig(
        max_new_tokens=params.max_completion_length,
        do_sample=sample,
        temperature=params.temperature or None,
        top_p=params.top_p if sample else None,
        top_k=0 if sample else None,
        num_return_sequences=params.num_generations,
        eos_token_id=stops,
        pad_token_id=pad_token,
        suppress_tokens=[*suppressed] or None,
    )


def truncate_at_stop(tokens: Sequence[int], stops: Sequence[int]) -> tuple[int, ...]:
    """`tokens` up to and including the first stop token."""
    ends = [tokens.index(stop) + 1 for stop in stops if stop in tokens]
    return tuple(tokens[: min(ends, default=None)])


def stop_tokens(tokenizer: PreTrainedTokenizerBase, extra: Sequence[str] = ()) -> list[int]:
    """Token ids that end a response.

    They are EOS, the end of a turn in the chat template, those of the model's generation config (of
    a tokenizer from `load_tokenizer`), and each string in `extra`, which must be one token.
    """
    known = getattr(tokenizer, "model_stops", None) or [end_of_turn(tokenizer)]
    ids = [*dict.fromkeys([tokenizer.eos_token_id, *known])]
    for text in extra:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise ConfigError(
                f"stop={text!r} is {len(tokens)} tokens: use a string that is a single token"
            )
        ids.append(tokens[0])
    return ids
