"""The `gac` command line. Run `gac --help` for a list of commands.

Each command imports its module lazily, so that `gac --help` is fast. Exit codes:
0 success, 1 the run failed, 2 invalid command or configuration (reported in one line; `--debug` or
GAC_DEBUG=1 also shows the traceback), 130 interrupted by Ctrl-C, SIGTERM or SIGHUP.
"""

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from gac.commands import COMMANDS, Parser, Version, argument, command, interrupt_on_signals
from gac.demo import DEMO_METHODS, REAL_METHODS
from gac.errors import (
    FAILED,
    USAGE,
    ConfigError,
    explain_missing_extra,
    require_counts,
    user_message,
    writable_folder,
)
from gac.parallel.run_lock import first_to_report

OK, INTERRUPTED = 0, 130
__all__ = ["FAILED", "INTERRUPTED", "OK", "USAGE", "main", "make_parser"]

EXAMPLES = """\
examples:
  gac init first                                  create a folder for a first run
  gac train first/run.yaml                        train, and write a report
  gac train examples/gsm8k.yaml --set steps=200   train, overriding one key of the file
"""
SET_HELP = (
    "override a configuration key, e.g. optim.lr=1e-5 or method=grpo; the last value of a key wins"
)
DEBUG: Any = {"action": "store_true", "help": "show tracebacks; same as GAC_DEBUG=1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argv: arguments without the program name."""
    debug = os.environ.get("GAC_DEBUG", "0") not in ("", "0")
    if argv is None:  # this process runs nothing else
        interrupt_on_signals()
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP threads spin only briefly before they sleep: without spinning, small models train
        # half as fast on idle cores; with more, many times slower on cores that others use as well
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
    if not sys.stderr.isatty():  # plain lines, also from transformers
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with explain_missing_extra("this command"):
            options = make_parser().parse_args(argv)
            debug |= options.debug
            try:
                return options.run(options)
            except SystemExit as stop:  # from the user's own code
                from gac.imports import location

                print(
                    f"gac: the code called sys.exit({stop.code!r}){location(stop)}", file=sys.stderr
                )
                return FAILED
    except KeyboardInterrupt as stop:  # by the user, or by the user's own code
        from gac.imports import location

        detail = f": {stop}" if str(stop) else location(stop)
        print(f"gac: interrupted{detail}; rerun the command to resume", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `gac methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:  # report user errors in one line
        known = user_message(error)
        if known is None:  # a bug: show its traceback
            raise
        if debug:
            traceback.print_exc()
        message, exit_code = known
        if first_to_report(message):
            print(f"gac: {message}", file=sys.stderr)
        return exit_code


def make_parser() -> argparse.ArgumentParser:
    """Build the parser for all commands."""
    parser = Parser(
        prog="gac",
        description="Hybrid SFT + RL post-training with an adaptive mixing weight.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", default=False, **DEBUG)
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    options: dict[str, Any] = {"title": "commands", "metavar": "COMMAND", "required": True}
    groups = {"": parser.add_subparsers(**options)}
    for name, (run, arguments, keys, texts) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        added = groups[group].add_parser(last, **texts)
        for names, settings in arguments:
            added.add_argument(*names, **settings)
        added.extra_help = partial(_keys, keys) if keys else None
        added.set_defaults(run=run)
        if run is None:
            groups[name] = added.add_subparsers(**options)
    for added in groups[""].choices.values():  # `gac --debug train` and `gac train --debug`
        added.add_argument("--debug", default=argparse.SUPPRESS, **DEBUG)
    return parser


# extend, so that both `--set a=1 b=2` and `--set a=1 --set b=2` work
SET = argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=SET_HELP)


@command(
    "init",
    argument("folder", type=Path, metavar="DIR", help="a new folder"),
    argument(
        "--model", metavar="NAME", help="folder or Hub name of a model, instead of a tiny one"
    ),
    help="create a folder with everything for a first run",
    description="Write DIR/run.yaml with comments, data, a reward with a test and a tiny "
    "model. Nothing is downloaded. Then run `gac train DIR/run.yaml`.",
)
def _init(options: argparse.Namespace) -> int:
    from gac.demo.project import create_project

    create_project(options.folder, options.model)
    print(f"Created {options.folder}. Next: gac train {options.folder}/run.yaml")
    return OK


@command(
    "train",
    argument(
        "config",
        type=Path,
        metavar="CONFIG.yaml",
        help="run configuration; its keys are listed below",
    ),
    SET,
    argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="resume from the last checkpoint in `out`, if there is one (default: yes)",
    ),
    keys="gac.train_config:TrainConfig",
    usage="%(prog)s CONFIG.yaml [--set KEY=VALUE ...] [--resume | --no-resume]",
    help="train a model from a configuration file",
    description="Train a model. All output, including a report, goes to the run directory "
    "`out`. Rerun the same command to resume an interrupted run from its last checkpoint.",
)
def _train(options: argparse.Namespace) -> int:
    from gac.training.check import load_checked

    config, _ = load_checked("gac.train_config:TrainConfig", options.config, options.set)
    _show_log()
    from gac.training.trainer import train

    run = train(config, options.resume)
    if os.environ.get("RANK", "0") == "0":
        from gac.report import write_report
        from gac.report.ending import ending

        print(f"{ending(Path(run))}\nRun: {run}\nReport: {write_report([run], run)}")
    return OK


@command(
    "check",
    argument("config", type=Path, metavar="CONFIG.yaml", help="a train or eval configuration"),
    SET,
    help="check a configuration, its files and its reward without training",
)
def _check(options: argparse.Namespace) -> int:
    from gac.training.check import is_evaluation, load_checked

    evaluation = is_evaluation(options.config, options.set)
    name = "gac.evaluation.config:EvalConfig" if evaluation else "gac.train_config:TrainConfig"
    _, passed = load_checked(name, options.config, options.set, None)
    print("\n".join([*passed, "All checks passed."]))
    return OK


@command(
    "eval",
    argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG.yaml",
        help="evaluation configuration (optional); its keys are listed below",
    ),
    argument(
        "--against",
        type=Path,
        metavar="RESULTS",
        help="`out` folder of an earlier evaluation; adds the paired difference on shared prompts",
    ),
    SET,
    keys="gac.evaluation.config:EvalConfig",
    usage="%(prog)s [CONFIG.yaml] [--set KEY=VALUE ...]",
    help="measure a model's accuracy on held-out prompts",
    description="Generate and score a model's responses to prompts. The result of a single "
    "task (key `eval`) is printed as a JSON object. The results of several tasks (`tasks`) "
    "are saved to `out`, with all responses, and printed as a table.",
)
def _eval(options: argparse.Namespace) -> int:
    from gac.training.check import load_checked

    name = "gac.evaluation.config:EvalConfig"
    config, _ = load_checked(name, options.config, options.set)
    from gac.evaluation.suite import evaluate_single, run_suite
    from gac.evaluation.table import results_table

    _show_log()
    result = (run_suite if config.tasks else evaluate_single)(config, options.against)
    if os.environ.get("RANK", "0") == "0":
        print(results_table(result) if config.tasks else json.dumps(result, indent=2))
    return OK


def _step(text: str) -> int | Literal["best"]:
    try:
        return "best" if text == "best" else int(text)
    except ValueError:
        message = f"expected a step number or 'best', got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


@command(
    "export",
    argument("source", type=Path, metavar="RUN", help="a run directory"),
    argument("out", type=Path, metavar="OUT", help="a new folder"),
    argument(
        "--checkpoint",
        type=_step,
        metavar="N|best",
        help="checkpoint to export: its step, or 'best' for the highest evaluation accuracy "
        "(default: the last intact checkpoint)",
    ),
    argument(
        "--adapters",
        action="store_true",
        help="write only the adapters of model.lora, as peft does (default: merge them)",
    ),
    argument(
        "--gguf",
        action="store_true",
        help="also write OUT/model.gguf, for llama.cpp (needs the extra gguf)",
    ),
    argument(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="also upload OUT to this repository of the Hub; a new one is private",
    ),
    help="export a checkpoint's model as a transformers folder",
    description="Write a folder that transformers' from_pretrained can load, regardless of how "
    "many processes trained the model.",
)
def _export(options: argparse.Namespace) -> int:
    from gac.training.export import export_run

    path = export_run(
        options.source,
        options.out,
        options.checkpoint,
        adapters=options.adapters,
        repository=options.push_to_hub,
        gguf=options.gguf,
    )
    print(f"{path} -> {options.out}")
    return OK


@command(
    "replay",
    argument("step", type=Path, metavar="RUN/replay/step-N", help="a saved step"),
    help="recompute a skipped step and list the rows that caused it",
    description="Steps with a non-finite or too large loss or gradient are skipped and saved "
    "under RUN/replay. Print the recorded values, the recomputed values and the rows at fault.",
)
def _replay(options: argparse.Namespace) -> int:
    from gac.training.replay import replay

    print(json.dumps(replay(options.step), indent=2))
    return OK


@command(
    "report",
    argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a run directory, the `out` folder of gac eval, or a folder that contains these",
    ),
    argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: the common parent folder of the runs)",
    ),
    help="write a report with plots and tables for one or more runs",
    description="Write report.html (a single file that works offline) and plots/, and "
    "print the tables. Runs that differ only in their seed are grouped; runs need not be over.",
)
def _report(options: argparse.Namespace) -> int:
    from gac.report import find_folders, results_table, write_report

    folders = find_folders(options.runs)
    out = options.out or Path(os.path.commonpath([folder.resolve() for folder in folders]))
    page = write_report(folders, writable_folder("--out", out))
    print(f"{results_table(folders)}\n\nReport: {page}")
    return OK


COMMANDS["rewards"] = (
    None,
    (),
    "",
    {
        "help": "check a dataset's reference solutions against its reward",
        "description": "Test rewards without a model.",
    },
)


@command(
    "rewards check",
    argument("config", type=Path, metavar="CONFIG.yaml", help="a train or eval configuration"),
    argument(
        "--min-reward",
        type=float,
        default=1.0,
        help="minimum reward of a passing solution (default: 1)",
    ),
    SET,
    help="score each row's reference solution and list the rows that fail",
    description="Score each row's reference solution with the configured reward and list the "
    "rows that fail. No model can be expected to pass those rows.",
)
def _check_rewards(options: argparse.Namespace) -> int:
    from gac.imports import find_user_code
    from gac.rewards.check import check

    _show_log()
    find_user_code(options.config)
    result = check(options.config, options.set, options.min_reward)
    for row in (*result.failing, *result.weak):
        print(row)
    events = ", ".join(f"{count} {name}" for name, count in result.counts.items() if count)
    passed = result.rows - len(result.failing)
    print(f"{passed} of {result.rows} rows pass{f' ({events})' if events else ''}")
    return FAILED if result.failing else OK


@command(
    "methods",
    argument("name", nargs="?", metavar="NAME", help="method to explain, or package.module:Class"),
    help="list the methods, or explain one",
    description="List the methods, or explain the method NAME and its keys.",
)
def _methods(options: argparse.Namespace) -> int:
    from gac.imports import find_user_code

    name = options.name
    if name is None:
        from gac.methods.listing import methods_table

        print(methods_table())
    else:
        find_user_code(None)
        from gac.config import choose, describe
        from gac.methods import all_methods

        method = type(choose(all_methods(), name))
        keys = describe(method, "method") or "It has no hyperparameters."
        print(f"{name}: {' '.join((method.__doc__ or '').split())}\n\n{keys}")
    return OK


@command(
    "demo",
    argument(
        "--out",
        type=Path,
        default=None,
        help="folder for all runs (default: runs/demo, or runs/real with --real)",
    ),
    argument(
        "--real",
        nargs="?",
        const=True,
        default=None,
        metavar="MODEL",
        help="post-train a pretrained model instead: a local folder or a name on the Hub; without "
        "MODEL, SmolLM2-135M-Instruct from a Python package",
    ),
    argument(
        "--methods",
        nargs="+",
        default=None,
        help="see `gac methods` (default: "
        f"{' '.join(DEMO_METHODS)}, or {' '.join(REAL_METHODS)} with --real)",
    ),
    argument("--seeds", type=int, default=1, help="seeds per method (default: 1; not with --real)"),
    argument(
        "--steps",
        type=int,
        default=None,
        help="optimizer steps per method (default: 160, or 16 with --real)",
    ),
    argument(
        "--jobs",
        type=int,
        default=None,
        help="number of parallel runs (default: one per core, at most 2 with --real)",
    ),
    help="train a tiny or a pretrained model with several methods and compare them",
    description="Train a tiny base model, post-train it with several methods and compare them. "
    "Finished runs are skipped; interrupted runs resume.",
)
def _demo(options: argparse.Namespace) -> int:
    require_counts(options, "seeds", "steps", "jobs")
    if options.real is not None:
        from gac.demo.real import run_real

        if options.seeds != 1:
            raise ConfigError(f"--seeds={options.seeds} has no effect with --real: remove it")
        model = None if options.real is True else options.real
        out, methods = options.out or Path("runs/real"), options.methods or REAL_METHODS
        return run_real(out, model, methods=methods, steps=options.steps or 16, jobs=options.jobs)
    from gac.demo.run import run_demo

    out, methods = options.out or Path("runs/demo"), options.methods or list(DEMO_METHODS)
    seeds, steps = range(options.seeds), options.steps or 160
    return run_demo(out, methods, seeds=seeds, steps=steps, jobs=options.jobs)


@command(
    "doctor",
    argument("--json", action="store_true", help="print JSON"),
    help="show which backends and adapters work here, and why others do not",
    description="Print versions, devices, backends, the trainers whose versions are supported, "
    "and a self-test of each backend against float64.",
)
def _doctor(options: argparse.Namespace) -> int:
    from gac_kernels.doctor import main as doctor

    return doctor(["--json"] if options.json else [])


@command(
    "study",
    argument(
        "config",
        type=Path,
        metavar="CONFIG.yaml",
        help="run configuration, as for `gac train`; may also contain `methods:`, a mapping from "
        "label to method",
    ),
    argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="NAME or package.module:Class, NAME:key=value,key.sub=value, LABEL@NAME:..., or a "
        "label of the file (default: all labels of the file)",
    ),
    argument("--seeds", type=int, default=3, metavar="N", help="run seeds 0 to N - 1 (default: 3)"),
    argument(
        "--baseline",
        metavar="NAME",
        help="label of the method to compare the others with (default: the first)",
    ),
    SET,
    argument(
        "--jobs", type=int, default=1, metavar="J", help="number of parallel runs (default: 1)"
    ),
    argument("--discard", action="store_true", help="delete the checkpoints of finished runs"),
    usage="%(prog)s CONFIG.yaml --methods A B ... [--seeds N] [--baseline NAME] "
    "[--set KEY=VALUE ...] [--jobs J]",
    help="compare methods over seeds, with intervals",
    description="Run every method with every seed, each run in its own folder under the "
    "configuration's `out`, then write study.json and study.html there. Finished runs are "
    "kept, so you can interrupt the command and rerun it, also with more seeds or methods; a "
    "failed run is reported and does not stop the others.",
)
def _study(options: argparse.Namespace) -> int:
    from gac.study.command import run

    return run(options)


def _keys(name: str) -> str:
    """Help text for a configuration class."""
    from gac.config import describe
    from gac.rewards import rewards_table

    module, _, class_name = name.partition(":")
    keys = describe(getattr(import_module(module), class_name))
    return f"configuration keys:\n\n{keys}\n\n{rewards_table()}"


def _show_log() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("urllib3.connectionpool", "huggingface_hub.utils._http"):  # each retry
        logging.getLogger(name).setLevel(logging.ERROR)
    if os.environ.get("RANK", "0") == "0":  # log once, not in every process
        logging.getLogger("gac").setLevel(logging.INFO)  # e.g. numbers of dropped rows


if __name__ == "__main__":
    sys.exit(main())
