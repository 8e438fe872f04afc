"""Checks of a run's files, packages and user code that do not need the model."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gac.config import load_early, read_yaml
from gac.data.config import DataConfig
from gac.data.examples import load_references, passes, rows_with_demos
from gac.data.row_text import chat_decision
from gac.data.source import FORMATS, read_rows, why_missing
from gac.errors import (
    ConfigError,
    MissingData,
    UserError,
    explain_missing_extra,
    value_errors_as,
    writable_folder,
)
from gac.fields import expanded
from gac.imports import load_object
from gac.models.config import ModelConfig, teacher_model
from gac.models.source import (
    check_model,
    check_tokenizer,
    check_vocabulary,
    has_chat_template,
    saved_vocabulary,
)
from gac.rewards import Reward, build_reward

logger = logging.getLogger(__name__)
WHOLE: Any = {"limit": None, "limit_seed": 0, "stratify_field": None}  # data without a sample


def load_checked(
    name: str, file: Path | None, overrides: Sequence[str], rows: int | None = 10_000
) -> tuple[Any, list[str]]:
    """Load the configuration class `name` and check what it names.

    Args:
        name: `gac.train_config:TrainConfig` or `gac.evaluation.config:EvalConfig`.
        file: the configuration file.
        overrides: `key=value` texts.
        rows: number of rows to read of each file; None: all.

    Returns:
        The configuration, and one line for each passed check.

    Raises:
        UserError: a check failed; the message names the key.
    """
    config = load_early(name, file, overrides)
    _require("transformers", "this command")
    _check_path("model.path", config.model.path, file)
    check_tokenizer(config.model, ask_hub=False)
    check_model(config.model, ask_hub=False)
    passed = [_model_line(config.model), *_teacher_lines(config, file)]
    for key, data, reward in _parts(config):
        reward_key = f"{key.removesuffix('data')}reward" if "." in key else ""
        passed += _check_data(key, data, file, rows)
        passed += [line for line in _chat_lines(config.model, key, data) if line not in passed]
        with value_errors_as(ConfigError, reward_key):
            built = build_reward(config.reward if reward is None else reward)
        try:
            passed += _score_first_row(config, key, data, built)
        finally:
            built.close()
    if hasattr(config, "rollouts"):
        check_demos(config)
        passed.append(check_training(config))
    return config, passed


def _teacher_lines(config: Any, file: Path | None) -> list[str]:
    """Check the files of the teacher's own model, and its tokenizer if that is in a folder."""
    if not hasattr(config, "teacher") or config.teacher.path is None:
        return []
    model = teacher_model(config.model, config.teacher.path)
    _check_path(model.key, model.path, file)
    check_tokenizer(model, ask_hub=False)
    check_model(model, ask_hub=False)
    own, policy = map(saved_vocabulary, (model, config.model))
    if own is None or policy is None:
        return [f"{model.key}: {model.path}; its tokenizer was not compared with the policy's"]
    check_vocabulary(model.path, own, policy)
    return [f"{model.key}: {model.path}, with the policy's tokenizer"]


def _parts(config: Any) -> Iterator[tuple[str, DataConfig, Any]]:
    """The key of each dataset, its value, and its reward (None: that of the configuration)."""
    training, main = hasattr(config, "rollouts"), config.eval
    tasks = main.tasks if training else config.tasks
    if training:
        yield "data", config.data, None
    if main.data.prompts or not (training or tasks):
        yield "eval.data", main.data, main.reward
    for label, task in tasks.items():
        yield f"{'eval.' if training else ''}tasks.{label}.data", task.data, task.reward


def _check_data(key: str, data: DataConfig, file: Path | None, limit: int | None) -> list[str]:
    """Read each file of a dataset once, at most `limit` rows."""
    sources = {"prompts": data.prompts, "demos": data.demos}
    sources |= {f"sources[{i}].path": source.path for i, source in enumerate(data.sources)}
    if not any(sources.values()):
        raise ConfigError(
            f"{key}.prompts is not set: give {FORMATS}, a folder or 'owner/name:split'"
        )
    passed = []
    for name, source in ((n, source) for n, source in sources.items() if source is not None):
        _check_path(f"{key}.{name}", source, file)
        if _path(source).is_file():
            counts = Counter(
                passes(data, row) for row in itertools.islice(read_rows(source), limit)
            )
            if not counts:
                raise ConfigError(f"{key}.{name}={source!r}: the file has no rows")
            if not counts[True] and counts.total() != limit:
                raise ConfigError(f"{key}.where={dict(data.where)}: no row of {source!r} passes")
            passed.append(f"{key}.{name}: {_rows_line(data, counts)}")
            continue
        _require("datasets", f"{key}.{name}={source!r}")
        if _path(source.partition(":")[0]).exists():
            passed.append(f"{key}.{name}: the folder {source!r} exists; its rows were not read")
        else:
            passed.append(
                f"{key}.{name}: {source!r} is not a path here, so it must be a dataset on the Hub; "
                "the Hub was not queried, and no row was read"
            )
    return passed


def _chat_lines(model: ModelConfig, key: str, data: DataConfig) -> list[str]:
    """What `data.chat=null` means for this model; [] if it is set. key: that of `data`."""
    known = has_chat_template(model)
    if known is None:
        unknown = data.chat is None and data.template is None
        return ["data.chat=null: the chat template is used if the tokenizer has one"] * unknown
    try:
        _, message = chat_decision(data, known)
    except ConfigError as error:
        raise ConfigError(f"{key.removesuffix('data')}{error}") from error
    return [message] if message else []


def _rows_line(data: DataConfig, counts: Counter[bool]) -> str:
    """How many rows are used, out of how many; counts: rows by whether they pass `where`."""
    used = min(counts[True], data.limit or counts[True])
    keys = [key for key, acts in (("where", counts[False]), ("limit", used < counts[True])) if acts]
    return f"{used} rows" + (f" of {counts.total()} (by {' and '.join(keys)})" if keys else "")


TRAINING_KEYS = {"data", "method", "rollouts", "steps"}


def is_evaluation(file: Path, overrides: Sequence[str]) -> bool:
    """Whether a configuration is one for `gac eval`; `gac train` has other top-level keys."""
    given = {override.partition("=")[0].strip().partition(".")[0] for override in overrides}
    keys = {*read_yaml(file), *given}
    return bool(keys & {"tasks", "eval"}) and not keys & TRAINING_KEYS


def _score_first_row(config: Any, key: str, data: DataConfig, reward: Reward) -> list[str]:
    """Check the fields of the first row; score its demonstration or, to evaluate, its answer."""
    first = data.prompts or next((source.path for source in data.sources), None)
    if first is None or not _path(first).is_file():
        return []
    training = key == "data"
    answers = not training or any(config.method.needs(i).rollouts for i in (0, config.steps - 1))
    row = replace(data, prompts=first, sources=(), **WHOLE)
    try:
        references = load_references(
            row if training else replace(row, demo_field=None), answers=answers, rows=1
        )
    except UserError:
        raise
    except ValueError:  # the first row has no demonstration
        return ["reward: imported, not run: the first row has no demonstration"]
    ((example, solution),) = references
    [score] = reward([solution], [example])
    return [f"reward: {score} for the demonstration of the first row"] if training else []


def check_demos(config: Any, *, anywhere: bool = False) -> None:
    """Raise ConfigError if the method or its teacher needs demonstrations, but no row has one.

    anywhere: also read rows that are in no file.
    """
    from gac.train_config import plan_of  # imports torch

    method, plan = config.method, plan_of(config)
    own = plan.demos == "prompt" and plan.teacher
    if plan.teacher and not own:
        _require_demos(config, True, "teacher.self=true needs", anywhere)
    if own or any(method.needs(step).demos for step in range(config.steps)):
        needs = f"method {method.name!r} needs"
        _require_demos(config, plan.demos == "prompt", needs, anywhere)


def _require_demos(config: Any, of_prompts: bool, needs: str, anywhere: bool) -> None:
    """Raise ConfigError if no row of the prompts, or of `data.demos`, has a demonstration."""
    field = config.data.demo_field
    data = replace(config.data, demos=None) if of_prompts else config.data
    only = [data.demos or data.prompts] if data.demos or data.prompts else []
    paths = only or [source.path for source in data.sources]
    if field is not None:
        if not anywhere and not all(_path(path).is_file() for path in paths):
            return
        rows = (row for path in paths for row in rows_with_demos(data, path, Counter()))
        if any(row.fields.get(field) is not None for row in rows):
            return
    lacks = f", but no row of {', '.join(paths)} has this field" if field is not None else ""
    raise ConfigError(
        f"data.demo_field={'null' if field is None else repr(field)}: {needs} demonstrations"
        f"{lacks}{' and passes data.where' if lacks and data.where else ''}: "
        f"set data.demo_field{'' if of_prompts or not lacks else ' or data.demos'}, or choose grpo"
    )


def check_training(config: Any) -> str:
    """Check `out`, the user's functions and optional packages; returns the size of the run."""
    out = Path(config.out).absolute()
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    writable_folder(f"out={config.out!r}: folder", existing)
    if (out / "config.json").is_file():
        raise ConfigError(f"out={config.out!r} is the folder of a model: choose another folder")
    functions = {
        "rollouts.function": config.rollouts.function,
        "eval.function": config.eval.function,
        **{f"eval.tasks.{name}.function": t.function for name, t in config.eval.tasks.items()},
        "data.order": config.data.order,
    }
    for key, name in functions.items():
        if name is not None:
            load_object(name, key)
    if config.model.lora is not None:
        _require("peft", "model.lora")
    if config.report_to:
        from gac.parallel.process_group import check_trackers  # imports torch

        check_trackers(config.report_to)
    if config.rollouts.engine == "vllm":
        _require("trl", "rollouts.engine=vllm")
    main, warmup = os.environ.get("RANK", "0") == "0", config.optim.warmup_steps
    if main and warmup > config.steps:
        logger.warning(
            "optim.warmup_steps=%d: the learning rate never reaches optim.lr in steps=%d: lower it",
            warmup,
            config.steps,
        )
    if main and (warning := config.method.run_warning(config.steps)):
        logger.warning("%s", warning)
    held_out = config.eval.data.prompts
    if main and held_out and held_out in (config.data.prompts, config.data.demos):
        logger.warning(
            "eval.data.prompts=%r is also trained on: its accuracy says nothing about new prompts",
            held_out,
        )
    if main and not held_out and config.method.keeps_best:
        logger.warning(
            "method %r keeps the last weights: set eval.data.prompts to select the best ones",
            config.method.name,
        )
    rollouts, demos = config.rollouts, config.demo_batch_size
    responses = rollouts.num_prompts * rollouts.num_generations
    tokens = responses * rollouts.max_completion_length
    return (
        f"steps: {config.steps}, each with {responses} responses (at most {tokens:,} tokens) and "
        f"{demos} demonstrations, if the method uses them"
    )


def _require(package: str, purpose: str) -> None:
    with explain_missing_extra(purpose):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


def _model_line(model: ModelConfig) -> str:
    """The number of parameters in the weights files, and the memory that they need in training."""
    count = 0
    for path in _path(model.path).glob("*.safetensors"):
        with path.open("rb") as file:  # the size of a JSON header, and the header
            size = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(min(size, path.stat().st_size)))
            except ValueError as error:
                raise ConfigError(
                    f"model.path={model.path!r}: the weights are corrupt ({path.name}): copy or "
                    "download them again"
                ) from error
        count += sum(math.prod(x["shape"]) for n, x in header.items() if n != "__metadata__")
    if not count:
        return f"model.path: {model.path}"
    width = 4 if model.dtype == "float32" else 2
    if model.lora is None:  # weight, gradient and AdamW's two moments
        width = 16 if model.master_weights else 4 * width
    return (
        f"model.path: {count / 1e6:.3g} million parameters; training takes "
        f"{count * width / 1e9:.2g} GB for weights, gradients and AdamW, more for activations"
    )


def _path(source: str) -> Path:
    return Path(expanded(source))


def _check_path(key: str, value: str, file: Path | None) -> None:
    """Raise MissingData for a file that does not exist, or exists only near the configuration."""
    path = _path(value)
    if path.exists() or _path(value.partition(":")[0]).is_dir():
        return
    near = file.resolve().parents[:3] if file else ()
    folder = next((f for f in near if (f / path).exists()), None)
    if folder is not None:
        raise MissingData(
            f"{key}={value!r}: no such file or folder here; it exists in {folder}: paths are "
            f"relative to the folder in which gac runs, so run the command in {folder}"
        )
    if "://" in value:
        raise MissingData(f"{key}={value!r}: URLs are not read: download the file")
    if key not in ("model.path", "teacher.path") and (problem := why_missing(value)):
        raise MissingData(f"{key}={value!r}: {problem}")
