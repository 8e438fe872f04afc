"""`gac eval`: evaluates a model on several tasks and can compare the results with earlier ones.

Results are saved after each task; an interrupted task continues after its last finished batch.

OUT/results.json        per task: accuracy, interval, pass@k; a finished task is not run again
OUT/samples.jsonl.gz    every prompt and answer of every finished task
OUT/unfinished/         the finished batches of a task that is not finished
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import json
import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gac import collectives
from gac.config import dump, save_text
from gac.data import Examples, load_prompts
from gac.errors import ConfigError, value_errors_as, writable_folder
from gac.models.causal_lm import load_model, load_tokenizer
from gac.parallel import process_group
from gac.parallel.config import ParallelConfig
from gac.parallel.run_lock import run_lock
from gac.rewards import Reward, build_reward, closing_reward
from gac.rollouts.config import RolloutConfig
from gac.rollouts.engines import Engine, RolloutFunction
from gac.rollouts.generation import stop_tokens

from .config import EvalConfig, EvalSettings, EvalTask
from .demo_nll import demo_nll
from .estimates import paired_difference
from .progress import Progress
from .table import percent, percent_interval
from .task import Answer, generate_answers, prompt_means, split_of, summary

logger = logging.getLogger(__name__)
RESULTS, SAMPLES = "results.json", "samples.jsonl.gz"
DAMAGE = ValueError, KeyError, TypeError, AttributeError  # raised by a file that is not ours


Outcome = tuple[list[Answer], float | None]
"""The answers of a task, and the loss of its demonstrations."""


class Job(NamedTuple):
    """A task that is ready to run: its data is loaded and its reward is built."""

    task: EvalTask
    examples: Examples
    reward: Reward


def evaluate_single(config: EvalConfig, against: Path | None = None) -> dict[str, Any]:
    """Run the task in `config.eval` as a suite, in which its name is `eval`.

    Returns its columns of eval.jsonl (see `flat`), and the comparison with `against`. If
    `config.out` is null, the finished batches are kept only until the evaluation is complete.
    """
    out = Path(config.out) if config.out else _temporary_folder(config)
    suite = replace(config, out=str(out), tasks={"eval": config.eval}, eval=EvalSettings())
    row = run_suite(suite, against)["tasks"]["eval"]
    if config.out is None and collectives.rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
    return flat(row) | {key: row[key] for key in ("against",) if key in row}


def _temporary_folder(config: EvalConfig) -> Path:
    """Where an evaluation without `out` can continue after an interruption.

    The name depends on all settings, and on the sizes and times of the local files and folders that
    they name, so an evaluation of a changed model, other rows or another reward starts anew.
    """
    from huggingface_hub.constants import HF_HOME

    setting = _setting(config, config.eval)
    files = [file for name in _strings(setting) for file in _local_files(name)]
    states = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(files)]
    key = hashlib.sha256(json.dumps([setting, states], sort_keys=True).encode()).hexdigest()[:16]
    return Path(HF_HOME) / f"gac-{os.getuid()}" / "evaluations" / key


def _strings(value: Any) -> Iterator[str]:
    """All strings in plain JSON types."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _local_files(name: str) -> list[Path]:
    """The files that a string may name: a file, those of a folder, or the code `place:function`."""
    place = name.rpartition(":")[0]
    texts = [text for text in (name, place, place and f"{place.replace('.', '/')}.py") if text]
    with contextlib.suppress(OSError):  # a text that is too long for a name
        files = [path for text in texts if (path := Path(text)).is_file()]
        return files or [f for text in texts[:1] for f in Path(text).glob("*") if f.is_file()]
    return []


def run_suite(config: EvalConfig, against: Path | None = None) -> dict[str, Any]:
    """Run every task that has no results in `config.out` yet.

    Args:
        config: the model and its tasks.
        against: another results.json or its folder; adds the paired difference over shared prompts.

    Returns:
        The contents of results.json: accuracies with their intervals, by task.

    Raises:
        ConfigError: `config.out` holds results for different settings, or `against` has no results.
        RunDirectoryError: another process evaluates into `config.out`.
    """
    out = Path(config.out or "evals")
    other = _read_other(against) if against else None
    if other is not None and not config.tasks.keys() & other.keys():
        raise ConfigError(
            f"--against={str(against)!r}: has results for {sorted(other)}, not for "
            f"{sorted(config.tasks)}"
        )
    with run_lock(out):
        return _run_suite(config, out, against, other)


def _run_suite(
    config: EvalConfig,
    out: Path,
    against: Path | None,
    other: dict[str, list[Answer]] | None,
) -> dict[str, Any]:
    """Run the unfinished tasks, then compare the answers of all tasks with those in `other`."""
    writable_folder("out", out)
    accelerator = process_group.make_accelerator(ParallelConfig(), (), str(out))
    # a slow rank must not read results that this run has written
    resume = functools.partial(_resume, config, out) if collectives.rank() == 0 else tuple
    results, answers = collectives.gather(collectives.run_on_all_ranks(resume))[0]
    unfinished = {n: t for n, t in config.tasks.items() if n not in results["tasks"]}

    def record(name: str, job: Job, run: Callable[[Job, Progress], Outcome]) -> None:
        started, setting = time.perf_counter(), _setting(config, job.task)
        progress = Progress(out, name, setting)
        answers[name], nll = run(job, progress)
        row = summary(answers[name], job.task, nll)
        counts = collectives.columns({}, job.reward.counts())
        for event, count in progress.counts.items():
            counts[event] = counts.get(event, 0) + count
        seconds = time.perf_counter() - started + progress.seconds
        results["tasks"][name] = {**row, "counts": counts, "seconds": seconds, "setting": setting}
        accuracy = f"{percent(row['accuracy'])}% {percent_interval(row['ci95'])}"
        logger.info("%s: accuracy %s, %d prompts", name, accuracy, row["prompts"])
        _write(out, results, answers)
        progress.close()

    if unfinished:
        _run_tasks(config, accelerator.device, unfinished, record)
    if other is not None:
        for name in config.tasks:
            row = results["tasks"][name]
            row.pop("against", None)  # of an earlier comparison
            if name in other:
                row["against"] = _compare(name, answers[name], other[name], against)
        _write(out, results, answers)
    process_group.leave()
    return results


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A task's `summary` as columns of eval.jsonl: accuracy, accuracy/<split>, response_length.

    prefix: name of an additional task; its columns are accuracy/<name> and accuracy/<name>/<split>.
    """
    tail = f"/{prefix}" if prefix else ""
    return {
        f"accuracy{tail}": row["accuracy"],
        f"ci95{tail}": row["ci95"],
        f"prompts{tail}": row["prompts"],
        **{f"accuracy{tail}/{s}": v["accuracy"] for s, v in sorted(row["splits"].items())},
        **{f"pass@{k}{tail}": v for k, v in row["pass_at"].items()},
        f"demo_nll{tail}": row["demo_nll"],
        f"response_length{tail}": row["response_length"],
        f"truncated{tail}": row["truncated"],
    }


def load_jobs(
    tasks: Mapping[str, EvalTask], tokenizer: Any, reward: Any, key: str = "tasks"
) -> dict[str, Job]:
    """Load the data, the function and the reward of each task; `reward` is the default.

    key: the configuration key with the tasks, for error messages.
    """
    jobs = {}
    for name, task in tasks.items():
        try:
            stop_tokens(tokenizer, task.stop)  # fail before any work
            if task.function:
                RolloutFunction(task.function, "function")
            examples = load_prompts(task.data, tokenizer, demos=False)
            for example in examples:
                split_of(task, example)
            own = reward if task.reward is None else task.reward
            jobs[name] = Job(task, examples, own if isinstance(own, Reward) else build_reward(own))
        except ValueError as error:  # invalid settings, invalid rows and missing files
            raise ConfigError(f"{f'{key}.{name}' if name else 'eval'}: {error}") from error
    return jobs


def read_samples(source: Path) -> dict[str, list[Answer]]:
    """Read the answers by task; `source` is a results.json or its folder.

    Raises:
        FileNotFoundError: there are no answers.
        ConfigError: they cannot be read.
    """
    folder = source.parent if source.name == RESULTS else source
    path = folder / SAMPLES
    if not path.is_file():
        raise FileNotFoundError(f"no {SAMPLES} found")
    answers: dict[str, list[Answer]] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                answers.setdefault(row.pop("task"), []).append(Answer(**row))
    except (OSError, EOFError, zlib.error, *DAMAGE) as error:
        raise _damaged(path, error) from error
    return answers


def _read_other(against: Path) -> dict[str, list[Answer]]:
    try:
        return read_samples(against)
    except FileNotFoundError as error:
        raise ConfigError(
            f"--against={str(against)!r}: {error}: give the output folder of an earlier gac eval"
        ) from error


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: not a gac eval result, or damaged ({error}); delete its folder")


def _run_tasks(
    config: EvalConfig,
    device: torch.device,
    tasks: Mapping[str, EvalTask],
    record: Callable[[str, Job, Callable[[Job, Progress], Outcome]], None],
) -> None:
    """Load the model and call `record(name, job, run)` for each task, on every process."""
    with value_errors_as(ConfigError):
        tokenizer = load_tokenizer(config.model)
        jobs = load_jobs(tasks, tokenizer, config.reward)
        engine = Engine(RolloutConfig(), tokenizer)
    engine.load(load_model(config.model, config.seed).to(device))

    def run(job: Job, progress: Progress) -> Outcome:
        answers = generate_answers(
            engine,
            job.examples,
            reward=job.reward,
            task=job.task,
            seed=config.seed,
            progress=progress,
        )
        return answers, demo_nll(engine.model, job.examples, tokenizer.pad_token_id)

    with contextlib.ExitStack() as rewards:
        for job in jobs.values():
            rewards.enter_context(closing_reward(job.reward))
        for name, job in jobs.items():
            record(name, job, run)


def _resume(config: EvalConfig, out: Path) -> tuple[dict[str, Any], dict[str, list[Answer]]]:
    """Results and answers of the finished tasks; empty if OUT is new."""
    path = out / RESULTS
    if not path.exists():
        return {"tasks": {}}, {}
    try:
        results = json.loads(path.read_text())
        settings = {name: row["setting"] for name, row in results["tasks"].items()}
    except DAMAGE as error:
        raise _damaged(path, error) from error
    for name, setting in settings.items():
        task = config.tasks.get(name)
        if task is not None and setting != _setting(config, task):
            raise ConfigError(
                f"out={config.out!r} holds task {name!r} with different settings: "
                "choose another out, or restore the original settings"
            )
    if not settings:
        return results, {}
    try:
        return results, {n: a for n, a in read_samples(out).items() if n in settings}
    except FileNotFoundError as error:
        raise ConfigError(
            f"out={config.out!r}: {RESULTS} has finished tasks, but {error} with their answers: "
            f"restore that file, delete {path} to run the tasks again, or choose another out"
        ) from error


def _setting(config: EvalConfig, task: EvalTask) -> dict[str, Any]:
    """All settings that affect a task's answers and scores, as plain JSON types."""
    reward = config.reward if task.reward is None else task.reward
    plain = {"model": dump(config.model), **dump(task), "reward": reward, "seed": config.seed}
    return json.loads(json.dumps(plain))


def _compare(
    task: str, answers: Sequence[Answer], other: Sequence[Answer], source: Any
) -> dict[str, Any]:
    first, second = prompt_means(answers), prompt_means(other)
    shared = [i for i in first if i in second]
    if first and second and not shared:
        raise ConfigError(f"--against={str(source)!r}: task {task!r} has none of the same prompts")
    paired = paired_difference([first[i] for i in shared], [second[i] for i in shared])
    return {
        "results": str(source),
        "difference": paired.difference if shared else None,
        "ci95": list(paired.ci95) if math.isfinite(sum(paired.ci95)) else None,
        "prompts": paired.pairs,
    }


def _write(out: Path, results: dict[str, Any], answers: Mapping[str, Sequence[Answer]]) -> None:
    """Write both files on rank 0, samples first: results.json never exists without its samples."""
    if collectives.rank():
        return
    _write_samples(out / SAMPLES, answers)
    save_text(out / RESULTS, json.dumps(results, indent=2) + "\n")


def _write_samples(path: Path, answers: Mapping[str, Sequence[Answer]]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with gzip.open(partial, "wt", encoding="utf-8") as file:
        for name, rows in answers.items():
            file.writelines(json.dumps({"task": name, **row._asdict()}) + "\n" for row in rows)
    partial.replace(path)


class Evaluator:
    """Evaluates a run's tasks. Falsy if there are none.

    Args:
        settings: the tasks.
        tokenizer: that of the model.
        reward: the run's reward, used for tasks that do not set their own.
        seed: sampling seed.
    """

    def __init__(self, settings: EvalSettings, tokenizer: Any, reward: Reward, seed: int) -> None:
        tasks = {"": settings, **settings.tasks} if settings.data.prompts else settings.tasks
        self.jobs, self.seed = load_jobs(tasks, tokenizer, reward, "eval.tasks"), seed
        _check_column_names(self.jobs)

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def __call__(self, engine: Engine, samples: Path | None = None) -> dict[str, Any]:
        """Evaluate all tasks and return a row of eval.jsonl; call it on every rank.

        Its columns are accuracy, accuracy/<split or task>, demo_nll, response_length and seconds.

        Args:
            engine: samples from the model, whose weights it has loaded.
            samples: file for all prompts and answers; None: this rank writes none.
        """
        started = time.perf_counter()
        row: dict[str, Any] = {}
        answers: dict[str, list[Answer]] = {}
        for name, job in self.jobs.items():
            answers[name] = generate_answers(
                engine, job.examples, reward=job.reward, task=job.task, seed=self.seed
            )
            nll = demo_nll(engine.model, job.examples, engine.tokenizer.pad_token_id)
            row |= flat(summary(answers[name], job.task, nll), name)
        if samples is not None:
            samples.parent.mkdir(parents=True, exist_ok=True)
            _write_samples(samples, answers)
        return {**row, "seconds": time.perf_counter() - started}

    def close(self) -> None:
        """Release the rewards' resources."""
        for job in self.jobs.values():
            job.reward.close()


def _check_column_names(jobs: Mapping[str, Job]) -> None:
    """Raise ConfigError if two tasks or splits would have the same column name."""
    first = jobs.get("")
    if first is None:
        return
    for split in dict.fromkeys(split_of(first.task, example) for example in first.examples):
        name = (split or "").partition("/")[0]
        if name and name in jobs:
            raise ConfigError(
                f"eval.tasks.{name}: the name conflicts with split {split!r} of the first task "
                f"(split_field={first.task.split_field!r}), whose column is accuracy/{split}; "
                f"rename eval.tasks.{name}"
            )
