"""Turns rows into tokenized examples: filters, prompt templates and length limits."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gac.errors import ConfigError, MissingData
from gac.fields import Checked, Count, Natural, Positive, setting
from gac.imports import load_object, user_code
from gac.order import MixedOrder, Order

from .conversations import (
    Message,
    demo_texts,
    is_message,
    refuse_template_kwargs,
    split_conversation,
)
from .encoding import RenderedText, UnrenderableDemo, chat_text, encode, plain_text
from .sample import sample
from .source import FORMATS, SourceRow, data_files, read_rows, why_missing
from .stored import Example, Examples, cache_path, store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
CHUNK = 1000  # rows that are tokenized at once and in memory at the same time


@dataclass(frozen=True)
class Source(Checked):
    """One of several sources of prompts."""

    path: str
    """Location of its rows, in the format of `data.prompts`."""
    name: str = ""
    """Name in the metrics and in `Example.source`; empty: the path."""
    weight: Positive = 1.0
    """Relative share of the sampled prompts; it does not apply to separate demonstrations."""

    @property
    def key(self) -> str:
        """The name, or the path."""
        return self.name or self.path


@dataclass(frozen=True)
class DataConfig(Checked):
    """Data sources, and how their rows are formatted as prompts.

    A source is a file (.jsonl, .json, .csv, .parquet, .arrow), the folder of a saved Hugging Face
    dataset or of data files, or `owner/name:split` on the Hub; see `gac.data.source.read_rows`.
    Rows have a `prompt` (text, or messages) and `solution` or `completion`, or `messages`.
    """

    prompts: str | None = None
    """Source of the prompts that are sampled and scored."""
    sources: tuple[Source, ...] = ()
    """Several sources of prompts instead of one, e.g. [{path: math.jsonl, weight: 2}, {path:
    code.parquet}]; their rewards are also reported separately."""
    demos: str | None = None
    """Source of the demonstrations; null: the rows of `prompts` that have a `demo_field`."""
    order: str | None = None
    """The order in which rows are visited, e.g. a curriculum: `package.module:Class`, a subclass of
    `gac.order.Order`, called with the examples and the seed. null: shuffled epochs."""
    prompt_field: str = "prompt"
    """Field with the question: text, or a list of messages with `role` and `content`. Without it,
    the prompt is all of `messages` before the assistant's last one."""
    answer_field: str | None = "answer"
    """Field with the reference answer, required in every row of `prompts`; null: no answers."""
    answer_pattern: str | None = setting(None, only_with="answer_field")
    """Regular expression with one group: the answer is that group's last match in the field."""
    demo_field: str | None = "solution"
    """Field with the expert response; without it, `completion` or the assistant's last message in
    `messages`. null: no demonstrations."""
    id_field: str = "id"
    """Field with the row's id; rows without it are named after their line or row."""
    source_field: str | None = None
    """Field with the name of the row's source, e.g. a dataset or a task: rewards and demonstration
    losses are also reported by source; `constant-alarm` and `guarded` have an alarm for each."""
    choices_field: str = setting("choices", only_with="template")
    """Field with the options of a multiple-choice question; `template` writes them as (A), (B)."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Keep the rows whose field has this value, or one of a list of values, e.g. {split: train}."""
    template: str | None = None
    """Template of the prompt, with `{prompt}` and, optionally, other fields of the row; `{{` is a
    literal brace."""
    demo_template: str | None = setting(None, only_with="demo_field")
    """Template of the expert response, with `{demo}` and, optionally, other fields of the row."""
    chat: bool | None = None
    """Format text prompts as user turns with the tokenizer's chat template, and demonstrations as
    its responses. null: if the tokenizer has a chat template and `template` is null."""
    system: str | None = None
    """System prompt for text prompts (requires `chat`), and for messages that contain none."""
    max_prompt_tokens: Count | None = None
    """Drop rows with longer prompts, and count them."""
    max_demo_tokens: Count | None = setting(None, only_with="demo_field")
    """Drop longer demonstrations (including EOS), and count them."""
    limit: Count | None = None
    """Maximum number of rows: a random sample of those that pass `where`, in their order. null: all
    of them."""
    limit_seed: Natural = setting(0, only_with="limit")
    """Seed of the sample of `limit`; the run's own seed does not change it."""
    stratify_field: str | None = setting(None, only_with="limit")
    """Field, e.g. the task, each value of which has its share of the sample of `limit`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needed in (("template", "prompt"), ("demo_template", "demo")):
            _check_template(name, getattr(self, name), needed)
        _check_pattern(self.answer_pattern)
        for name in ("prompts", "source_field"):
            if self.sources and (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value!r}: give either {name} or sources, not both")
        names = [source.key for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: the names {names} are not distinct: set `name` in each")


def _check_pattern(pattern: str | None) -> None:
    try:
        groups = 1 if pattern is None else re.compile(pattern).groups
    except re.error as error:
        raise ValueError(
            f"answer_pattern={pattern!r} is not a valid regular expression: {error}"
        ) from error
    if groups != 1:
        raise ValueError(f"answer_pattern must have exactly one group (...), got {pattern!r}")


def _check_template(name: str, template: str | None, needed: str) -> None:
    if template is None:
        return
    try:
        fields = {part[1] for part in string.Formatter().parse(template)}
    except ValueError as error:
        message = f"{name}: {error} in {template!r}; write {{{{ for a literal brace"
        raise ValueError(message) from error
    if needed not in fields:
        raise ValueError(f"{name} must contain {{{needed}}}, got {template!r}")


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
    return _load(config, tokenizer, sources, rows, "prompts", training=training, demos=demos)


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

    return _load(config, tokenizer, parts, rows, "demonstrations")


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
            prompt = _templated(config, row)
        if demo is None:
            dropped[f"without {config.demo_field or 'an answer'!r}"] += 1
            continue
        kind = source.key if config.sources else _source(config, row)
        references.append((Example(name, (), prompt, answer, None, dict(row.fields), kind), demo))
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
            texts.append(_text(config, tokenizer, row, required=not answers))
        except UnrenderableDemo:
            if demos:
                raise
            dropped["demonstration that the chat template does not render"] += 1
            texts.append(_text(replace(config, demo_field=None), tokenizer, row, required=False))
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


def uses_chat(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether text prompts are formatted with the tokenizer's chat template.

    If `config.chat` is None, the decision is logged, once for each tokenizer.
    """
    used, message = chat_decision(config, bool(getattr(tokenizer, "chat_template", None)))
    logged = tokenizer.__dict__.setdefault("chat_decisions", set())
    if message and message not in logged:
        logged.add(message)
        logger.info("%s", message)
    return used


def chat_decision(config: DataConfig, has_template: bool) -> tuple[bool, str]:
    """Whether text prompts are formatted with the chat template, and a message about a default.

    has_template: whether the tokenizer has a chat template.

    Raises:
        ConfigError: the configuration requires a chat template, but there is none.
    """
    if config.chat is not None:
        if config.chat and not has_template:
            raise ConfigError(
                "data.chat=true: the tokenizer has no chat template: set data.chat=false, or "
                "model.tokenizer to one that has one"
            )
        return config.chat, ""
    if not has_template:
        decision = "are used as they are: the tokenizer has no chat template"
    elif config.template is not None:
        decision = "get no chat template, because data.template is set; data.chat=true adds it"
    else:
        decision = "are formatted with the tokenizer's chat template; data.chat=false turns it off"
    return has_template and config.template is None, f"data.chat=null: text prompts {decision}"


def _text(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, row: SourceRow, *, required: bool
) -> RenderedText:
    """The row's prompt and demonstration as text.

    required: whether the row must have a demonstration.
    """
    demo = _demo(config, row, required=required)
    messages = _messages(config, row)
    fields = config.prompt_field, config.demo_field or ""
    if messages and config.template is not None:
        row.fail(config.prompt_field, "is a list of messages: data.template needs a text")
    if not messages:
        text = _templated(config, row)
        if not uses_chat(config, tokenizer):
            _refuse_chat(config, row, demo)
            return plain_text(tokenizer, text, [] if isinstance(demo, Mapping) else demo)
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        messages = [*system, {"role": "user", "content": text}]
    return chat_text(tokenizer, row, messages, demo, fields)


def _refuse_chat(config: DataConfig, row: SourceRow, demo: Message | list[str]) -> None:
    """Raise an error for what acts only in a chat template."""
    if config.system is not None:
        raise ConfigError(f"data.system={config.system!r}: a text prompt needs data.chat=true")
    if is_message(demo):
        names = ", ".join(sorted({*demo} - {"role", "content"}))
        row.fail(config.demo_field or "", f"a message with {names} needs data.chat=true")
    refuse_template_kwargs(row)


def _templated(config: DataConfig, row: SourceRow) -> str:
    """The prompt of a row without messages, in the template."""
    text = row.text(config.prompt_field, key="prompt_field")
    assert text is not None  # `row.text` raises if the field is missing
    if config.template is None:
        return text
    return _fill(config.template, row, {**_printable(config, row), "prompt": text})


def _messages(config: DataConfig, row: SourceRow) -> list[Any]:
    """The messages of a conversation, with the system prompt; empty for a prompt that is text."""
    messages = row.fields.get(config.prompt_field)
    if not isinstance(messages, list):
        return []
    system = config.system is not None and messages[0]["role"] != "system"
    return [*([{"role": "system", "content": config.system}] if system else []), *messages]


def _demo(config: DataConfig, row: SourceRow, *, required: bool) -> Message | list[str]:
    """The demonstration: a message, or the texts of its turns; [] if there is none."""
    if config.demo_field is None:
        return []
    if is_message(message := row.fields.get(config.demo_field)):
        if config.demo_template is not None:
            extra = ", ".join(sorted({*message} - {"role", "content"}))
            row.fail(config.demo_field, f"has {extra}: data.demo_template needs a text")
        return message
    turns = demo_texts(row, config.demo_field, required=required)
    if config.demo_template is None:
        return turns
    if len(turns) > 1:
        row.fail(config.demo_field, "has several turns: data.demo_template needs a single text")
    values = _printable(config, row)
    return [_fill(config.demo_template, row, {**values, "demo": text}) for text in turns]


def _printable(config: DataConfig, row: SourceRow) -> dict[str, Any]:
    """The row's fields for a template: choices get letters, other lists have an item per line."""
    shown = dict(row.fields)
    for name, value in row.fields.items():
        if isinstance(value, list):
            lines = [str(item) for item in value]
            if name == config.choices_field:
                if len(lines) > len(string.ascii_uppercase):
                    supported = len(string.ascii_uppercase)
                    row.fail(name, f"has {len(lines)} choices, but only {supported} are supported")
                pairs = zip(string.ascii_uppercase, lines, strict=False)
                lines = [f"({letter}) {line}" for letter, line in pairs]
            shown[name] = "\n".join(lines)
    return shown


def _fill(template: str, row: SourceRow, values: Mapping[str, Any]) -> str:
    try:
        return template.format_map({k: value for k, value in values.items() if value is not None})
    except KeyError as error:
        name = str(error.args[0])
        state = "is null" if name in values else "is missing"
        row.fail(name, f"{state}, but the template {template!r:.80} uses it")
    except (AttributeError, IndexError, ValueError) as error:  # {x.y}, {0}, {x:d}
        raise ConfigError(f"the template {template!r:.80} cannot be filled: {error}") from error


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
