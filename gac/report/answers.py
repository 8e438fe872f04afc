"""Held-out answers before and after training, on the same prompts."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gac.evaluation.estimates import accuracy_interval
from gac.evaluation.table import percent, percent_interval

from .groups import Group
from .reading import Run

PER_KIND = 3  # prompts of each kind whose answers are shown
KINDS = 8  # kinds of prompts that are shown
FORMS = 5  # forms of rewarded answers that are listed
WIDTH = 60  # characters of a form
BEFORE = "before training"
Answers = Sequence[Mapping[str, Any]]


def before_and_after(groups: Sequence[Group]) -> dict[str, Any] | None:
    """What the page shows of the first run of each group; None without answers of two evaluations.

    Returns "kinds" (of prompts); "accuracy", "cut_off" (share of answers that ended at the limit of
    tokens) and "rewarded", with one row per model: the one before training and that of each group;
    and "prompts", with the answers of all models.
    """
    known = [(group.label, *ends) for group in groups if (ends := _ends(group.runs[0]))]
    if not known:
        return None
    models = list(_models(known))
    kinds = list(dict.fromkeys(a["split"] for _, answers in models for a in answers))
    return {
        "kinds": [kind for kind in kinds if kind is not None],
        "accuracy": [(name, _accuracies(answers, kinds)) for name, answers in models],
        "cut_off": {
            name: f"{percent(sum(a['truncated'] for a in answers) / len(answers))}%"
            for name, answers in models
        },
        "prompts": [
            _prompt(number, models) for kind in kinds[:KINDS] for number in _first(models, kind)
        ],
        "rewarded": [(name, rewarded_forms(answers)) for name, answers in models],
    }


def rewarded_forms(answers: Answers) -> list[tuple[str, int]]:
    """The most frequent forms of rewarded answers, with their counts.

    In a form, "#" stands for any number and "A" for any word in capitals, so that a reward that
    pays for something else than the answer shows as a frequent form.
    """
    paid = (answer["response"] for answer in answers if (answer["score"] or 0) > 0)
    return Counter(map(_form, paid)).most_common(FORMS)


def _form(text: str) -> str:
    form = re.sub(r"\b[A-Z]{2,}\b", "A", re.sub(r"\d[\d,.]*\d|\d", "#", " ".join(text.split())))
    return form if len(form) <= WIDTH else form[: WIDTH - 1] + "…"


def _ends(run: Run) -> tuple[Answers, Answers] | None:
    """The answers of a run's first and last evaluation."""
    files = [run.path / "evals" / f"step-{int(step):08d}.jsonl.gz" for step in run.evals["step"]]
    files = [file for file in files if file.is_file()]
    if len(files) < 2:
        return None
    ends = _read(files[0]), _read(files[-1])
    return ends if all(ends) else None


def _read(file: Path) -> Answers:
    """The answers to the prompts of `eval.data`; those of additional tasks are left out."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [answer for answer in map(json.loads, lines) if answer["task"] == ""]


def _models(known: Sequence[tuple[str, Answers, Answers]]) -> Iterator[tuple[str, Answers]]:
    """The name and answers of each model: before training (once, if all agree) and after it."""
    responses = {tuple(answer["response"] for answer in before) for _, before, _ in known}
    shared = len(responses) == 1
    if shared:
        yield BEFORE, known[0][1]
    for label, before, after in known:
        if not shared:
            yield f"{label}, {BEFORE}", before
        yield label, after


def _accuracies(answers: Answers, kinds: Sequence[str | None]) -> list[tuple[str, str]]:
    """Mean score and its interval, in percent: over all prompts, then over those of each kind."""
    parts = [answers]
    parts += [[a for a in answers if a["split"] == kind] for kind in kinds if kind is not None]
    return [_mean(part) for part in parts]


def _mean(answers: Answers) -> tuple[str, str]:
    scores: dict[int, list[float]] = {}
    for answer in answers:
        if answer["score"] is not None:
            scores.setdefault(answer["number"], []).append(answer["score"])
    means = [sum(values) / len(values) for values in scores.values()]
    if not means:
        return "–", ""
    binary = all(0 <= value <= 1 for value in means)
    interval = percent_interval(accuracy_interval(means)) if binary else ""
    return f"{percent(sum(means) / len(means))}%", interval


def _first(models: Sequence[tuple[str, Answers]], kind: str | None) -> list[int]:
    """The numbers of the first prompts of a kind."""
    numbers = dict.fromkeys(a["number"] for a in models[0][1] if a["split"] == kind)
    return list(numbers)[:PER_KIND]


def _prompt(number: int, models: Sequence[tuple[str, Answers]]) -> dict[str, Any]:
    """A prompt with the first answer of each model."""
    answers = {
        name: next((a for a in answers if a["number"] == number), None) for name, answers in models
    }
    first = next(answer for answer in answers.values() if answer)
    return {
        "prompt": first["prompt"],
        "reference": first["reference"],
        "answers": [(name, answer) for name, answer in answers.items() if answer],
    }
