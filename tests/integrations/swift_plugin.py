"""Plugin for --external_plugins: our trainer, plus a reward and a template for the tests."""

from typing import Any

from swift.rewards import ORM, orms
from swift.template import TemplateMeta, register_template

import gac.integrations.swift  # noqa: F401 - replaces swift's GRPO trainer with ours


class Digits(ORM):
    """Fraction of characters that are digits."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


orms["digits"] = Digits
register_template(
    TemplateMeta("digits", prefix=[], prompt=["{{QUERY}}"], chat_sep=[], suffix=[["eos_token_id"]])
)
