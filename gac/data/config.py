"""Configuration of the data: their sources, and how rows become prompts and demonstrations."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gac.fields import Checked, Count, Natural, Positive, setting


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
