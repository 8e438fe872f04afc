"""Loads rows as tokenized examples: filters, samples and length limits."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gac.errors import ConfigError, MissingData
from gac.imports import load_object, user_code
from gac.order import MixedOrder, Order

from .config import DataConfig, Source
from .conversations import (
    demo_texts,
    is_message,
    split_conversation,
)
from .encoding import UnrenderableDemo, encode
from .row_text import row_text, templated_prompt, uses_chat
from .sample import sample
from .source import FORMATS, SourceRow, data_files, read_rows, why_missing
from .stored import Example, Examples, cache_path, store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
CHUNK = 1000  # rows that are tokenized at once and in memory at the same time


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    training: bool = False,
    demos: bool = True,
) -> Examples:
    """Load the rows of `config.prompts`.

    `demo` is set for rows with a demonstration: `config.demo_field`, `completion`, or the last
    message if it is the assistant's.

    Args:
        config: the data source and its format.
        tokenizer: any Hugging Face tokenizer; needs an EOS token if there are demonstrations.
        training: if True, reject rows with a `canary` field, whose authors forbid training on them.
        demos: whether demonstrations are needed. If False, one that the chat template does not
            render is dropped and counted; else it is an error.

    Returns:
        Examples in file order; `.dropped` counts the dropped rows by reason (also logged).

    Raises:
        DataError: an invalid row; the message gives file, line or row, and field.
        ValueError: no source is set, or no row is left.
    """

    def rows(path: str, dropped: Counter[str]) -> Iterator[SourceRow]:
        selected = select_rows(config, "prompts", path, dropped)
        return _without_canaries(selected) if training else selected

    sources = _prompt_sources(config)
    return _load(
        config,
        tokenizer,
        sources=sources,
        rows=rows,
        kind="prompts",
        training=training,
        demos=demos,
    )


def _prompt_sources(config: DataConfig) -> tuple[Source, ...]:
    if config.prompts is None and not config.sources:
        raise ConfigError(f"data.prompts is not set: give {FORMATS}, a folder or owner/name:split")
    return config.sources or (Source(config.prompts or ""),)


def prompt_order(config: DataConfig, prompts: Examples, seed: int) -> Order | MixedOrder:
    """The order in which `prompts`, loaded with `config`, are visited."""
    if config.order is not None or not config.sources:
        return row_order(config, prompts, seed)
    sizes = [prompts.sources[source.key] for source in config.sources]
    return MixedOrder(sizes, [source.weight for source in config.sources], seed)


def row_order(config: DataConfig, examples: Sequence[Example], seed: int) -> Order:
    """The order in which the rows of one source are visited: the user's, or shuffled epochs."""
    if config.order is None:
        return Order(len(examples), seed)
    with user_code(f"data.order={config.order!r}"):
        return load_object(config.order, "data.order")(examples, seed)


def load_demos(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Examples:
    """Load the demonstrations: the rows of `config.demos` if set, else those of `config.prompts`.

    Rows of `config.prompts` without a demonstration are left out. Every example has a `demo`;
    `answer` is set if the row has one. Arguments, `.dropped` and errors as in `load_prompts`; rows
    with a `canary` field are always rejected.
    """
    source = config.demos or config.prompts
    parts = config.sources if source is None else (Source(source),)
    if not parts or config.demo_field is None:
        raise ValueError(
            "no demonstrations are configured: set data.demo_field, and either data.demos or "
            "data.prompts"
        )

    def rows(path: str, dropped: Counter[str]) -> Iterator[SourceRow]:
        return _without_canaries(rows_with_demos(config, path, dropped))

    return _load(config, tokenizer, sources=parts, rows=rows, kind="demonstrations")


def _load(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    rows: Callable[[str, Counter[str]], Iterator[SourceRow]],
    kind: str,
    *,
    training: bool = False,
    demos: bool = True,
) -> Examples:
    """Tokenize the rows of `sources`, or find them in the cache.

    rows: reads the rows of a path, and counts the dropped ones.
    training, demos: as in `load_prompts`.
    """
    dropped: Counter[str] = Counter()
    prompts, named = kind == "prompts", sources is config.sources

    def examples(source: Source) -> Iterator[Example]:
        read = rows(source.path, dropped)
        encoded = _encode(config, tokenizer, read, dropped, answers=prompts, demos=demos)
        for example in encoded:
            if prompts or example.demo:
                yield replace(example, source=source.key) if named else example

    key = "sources" if named else "demos" if config.demos and not prompts else "prompts"
    files = [file for source in sources for file in data_files(source.path, f"data.{key}")]
    if config.chat is None:
        uses_chat(config, tokenizer)  # logs the decision also if the rows are in the cache
    cache = cache_path(tokenizer, files, kind, training, demos, replace(config, order=None))
    stored = store(cache, itertools.chain.from_iterable(map(examples, sources)), dropped)
    reasons = "; ".join(f"{n} {reason}" for reason, n in stored.dropped.items()) or "nothing"
    empty = [x.path for x in sources if named and prompts and not stored.sources[x.key]]
    paths = ", ".join(empty or [source.path for source in sources])
    if empty or not stored:
        raise ValueError(f"{paths}: no rows left (dropped: {reasons})")
    logger.info("%s: %d %s; dropped: %s", paths, len(stored), kind, reasons)
    return stored


def load_references(
    config: DataConfig, *, answers: bool = False, rows: int | None = None
) -> list[tuple[Example, str]]:
    """Load the rows of `config.prompts` or `config.sources`, each with its reference solution.

    That is the field `demo_field` or, if that is None, the answer. Needs no tokenizer: the examples
    have no token ids, and conversations no template. Rows without a solution are left out.

    answers: every row needs an answer, as in training.
    rows: number of rows to read; None: all.

    Raises:
        DataError: an invalid row; the message gives file, line or row, and field.
        ValueError: no source is set, or no row is left.
    """
    sources, dropped = _prompt_sources(config), Counter[str]()
    references = []
    pairs = ((x, row) for x in sources for row in select_rows(config, "prompts", x.path, dropped))
    for source, row in itertools.islice(pairs, rows):
        demo = answer = _answer(config, row, required=answers)
        if config.demo_field is not None:
            demo = _reference(row, config.demo_field)
        name = row.text(config.id_field, required=False) or row.location
        prompt = row.fields.get(config.prompt_field)
        if isinstance(prompt, list):
            prompt = "\n".join(message["content"] for message in prompt)
        else:
            prompt = templated_prompt(config, row)
        if demo is None:
            dropped[f"without {config.demo_field or 'an answer'!r}"] += 1
            continue
        kind = source.key if config.sources else _source(config, row)
        example = Example(
            id=name,
            prompt=(),
            prompt_text=prompt,
            answer=answer,
            demo=None,
            extra=dict(row.fields),
            source=kind,
        )
        references.append((example, demo))
    if not references:
        reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.items()) or "nothing"
        raise ValueError(
            f"{', '.join(x.path for x in sources)}: no rows left (dropped: {reasons}); set "
            "data.demo_field to the field with reference solutions, or to null to score each row's "
            "answer instead"
        )
    return references


def _reference(row: SourceRow, field: str) -> str | None:
    """The text of a demonstration to grade; None for tool calls, which need a tokenizer."""
    if is_message(message := row.fields.get(field)):
        return None if message.get("tool_calls") else message["content"]
    return "".join(demo_texts(row, field, required=False)) or None


def select_rows(
    config: DataConfig, key: str, source: str, dropped: Counter[str]
) -> Iterator[SourceRow]:
    """Read the rows of `source` (the value of data.`key`) that pass `where` and are in the sample.

    With `limit`, the source is read twice: its rows are not kept in memory.
    """
    key = "sources" if config.sources and key == "prompts" else key
    chosen: set[int] = set()
    if config.limit is not None:
        passing = filter(functools.partial(passes, config), _read(key, source))
        strata = [_stratum(config, row) for row in passing]
        chosen = sample(strata, config.limit, config.limit_seed)
    number = 0  # position among the rows that pass
    for row in _read(key, source):
        if not passes(config, row):
            dropped["excluded by where"] += 1
            continue
        if config.limit is None or number in chosen:
            yield split_conversation(row, config.prompt_field, config.demo_field)
        else:
            dropped[f"not in the sample of limit={config.limit}"] += 1
        number += 1


def _read(key: str, source: str) -> Iterator[SourceRow]:
    try:
        return read_rows(source, f"data.{key}")
    except MissingData as error:
        raise MissingData(f"data.{key}={source!r}: {why_missing(source)}") from error


def passes(config: DataConfig, row: SourceRow) -> bool:
    """Whether the row has the values of `config.where`."""
    for name, value in config.where.items():
        allowed = value if isinstance(value, list | tuple) else [value]
        if row.get(name, key="where") not in allowed:
            return False
    return True


def _stratum(config: DataConfig, row: SourceRow) -> str:
    """The row's stratum in the sample of `limit`."""
    if config.stratify_field is None:
        return ""
    return repr(row.get(config.stratify_field, key="stratify_field"))


def rows_with_demos(config: DataConfig, source: str, dropped: Counter[str]) -> Iterator[SourceRow]:
    """The rows of `source` with a demonstration; in `data.demos`, one without it is an error."""
    for row in select_rows(config, "demos" if config.demos else "prompts", source, dropped):
        if config.demos or row.fields.get(config.demo_field or "") is not None:
            yield row
        else:
            dropped[f"without the field data.demo_field={config.demo_field!r}"] += 1


def _without_canaries(rows: Iterator[SourceRow]) -> Iterator[SourceRow]:
    """Yield `rows`; raise DataError for a row that must not be trained on."""
    for row in rows:
        if "canary" in row.fields:
            row.fail(
                "canary", "its authors forbid training on this row: use it for evaluation only"
            )
        yield row


def _encode(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[SourceRow],
    dropped: Counter[str],
    *,
    answers: bool,
    demos: bool,
) -> Iterator[Example]:
    """Tokenize `rows` chunk by chunk, and apply the length limits."""
    while chunk := list(itertools.islice(rows, CHUNK)):
        for example in _encode_chunk(
            config, tokenizer, chunk, dropped=dropped, answers=answers, demos=demos
        ):
            if limited := _apply_limits(config, example, dropped):
                yield limited


def _encode_chunk(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[SourceRow],
    *,
    dropped: Counter[str],
    answers: bool,
    demos: bool,
) -> list[Example]:
    """Render every row as text, then tokenize prompts and demonstrations in one call each."""
    texts = []
    for row in rows:
        try:
            texts.append(row_text(config, tokenizer, row, required=not answers))
        except UnrenderableDemo:
            if demos:
                raise
            dropped["demonstration that the chat template does not render"] += 1
            texts.append(row_text(replace(config, demo_field=None), tokenizer, row, required=False))
    examples = []
    for row, text, ids in zip(rows, texts, encode(tokenizer, texts), strict=True):
        if not ids.prompt:
            row.fail(
                config.prompt_field, f"the tokenizer produces no tokens for {text.prompt!r:.60}"
            )
        examples.append(
            Example(
                id=row.text(config.id_field, required=False) or row.location,
                prompt=ids.prompt,
                prompt_text=text.prompt,
                answer=_answer(config, row, required=answers),
                demo=ids.demo,
                extra=dict(row.fields),
                source=_source(config, row),
                demo_mask=ids.demo_mask,
            )
        )
    return examples


def _source(config: DataConfig, row: SourceRow) -> str:
    """The row's own source, or an empty string."""
    return row.text(config.source_field, key="source_field") or "" if config.source_field else ""


def _answer(config: DataConfig, row: SourceRow, *, required: bool) -> str | None:
    if config.answer_field is None:
        return None
    text = row.text(config.answer_field, required=required, key="answer_field (null: no answers)")
    if text is None or config.answer_pattern is None:
        return text
    matches = re.findall(config.answer_pattern, text, re.MULTILINE)  # as in the rewards
    if not matches:
        row.fail(config.answer_field, f"answer_pattern {config.answer_pattern!r} does not match")
    return matches[-1].strip()


def _apply_limits(config: DataConfig, example: Example, dropped: Counter[str]) -> Example | None:
    """Apply the length limits: returns None for a long prompt, and removes a long `demo`."""
    if len(example.prompt) > (config.max_prompt_tokens or math.inf):
        dropped[f"prompt longer than {config.max_prompt_tokens} tokens"] += 1
        return None
    if len(example.demo or ()) > (config.max_demo_tokens or math.inf):
        dropped[f"demonstration longer than {config.max_demo_tokens} tokens"] += 1
        return replace(example, demo=None, demo_mask=())
    return example
