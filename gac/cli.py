"""The command line: `gac train | eval | study | report | methods | demo` and others: `gac --help`.

Each command imports its module when it runs, so that `gac --help` answers at once. Exit codes:
0 done, 1 a run that cannot go on, 2 a mistake in the command or the configuration (one line says
which; `--debug` or GAC_DEBUG=1 shows the traceback too), 130 interrupted.
"""

import argparse
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from gac.demo import METHODS as COMPARED
from gac.errors import (
    FAILED,
    USAGE,
    ConfigError,
    extras_named,
    refusals_are,
    verdict,
    writable_folder,
)
from gac.remembered import remembered
from gac.study.command import add_parser as add_study

OK, INTERRUPTED = 0, 130
__all__ = ["FAILED", "INTERRUPTED", "OK", "USAGE", "main", "make_parser"]

EXAMPLES = """\
examples:
  gac demo                                        train and compare methods on a tiny task
  gac train examples/gsm8k.yaml --set steps=200   train, changing one key of the file
  gac report runs/demo                            a page about the runs below a folder
  gac methods gac                                 what a method does and its hyperparameters
"""
SET_HELP = "one configuration key, e.g. optim.lr=1e-5 or method=grpo; the last of several wins"


DEBUG_HELP = "also show the traceback of an error; same as GAC_DEBUG=1"


class Parser(argparse.ArgumentParser):
    """A parser whose help goes on with text that is only made when it is asked for."""

    more: Callable[[], str] | None = None

    def format_help(self) -> str:
        return super().format_help() + (f"\n{self.more()}\n" if self.more else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argv: without the program's name."""
    debug = os.environ.get("GAC_DEBUG", "0") not in ("", "0")
    try:
        with extras_named("this command"):
            options = make_parser().parse_args(argv)
            debug |= options.debug
            return options.run(options)
    except KeyboardInterrupt as stop:
        detail = f": {stop}" if str(stop) else ""
        print(f"gac: interrupted{detail}; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `gac methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:  # what a user can mend becomes a line
        found = verdict(error)
        if found is None:  # a defect: its traceback is wanted
            raise
        if debug:
            traceback.print_exc()
        print(f"gac: {found[0]}", file=sys.stderr)
        return found[1]


def make_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = Parser(
        prog="gac",
        description="Hybrid SFT + RL post-training with an adaptive mixing weight.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", default=False, help=DEBUG_HELP)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_eval(commands)
    _add_export(commands)
    _add_replay(commands)
    _add_report(commands)
    _add_rewards(commands)
    _add_methods(commands)
    _add_demo(commands)
    add_study(commands)
    for command in commands.choices.values():  # `gac --debug train` and `gac train --debug`
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG_HELP
        )
    return parser


def _add_train(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser(
        "train",
        usage="%(prog)s CONFIG.yaml [--set KEY=VALUE ...] [--resume | --no-resume]",
        help="train a model as a configuration file says",
        description="Train a model. Everything is written to the run directory `out`, a report "
        "included. A run that was interrupted goes on from its last checkpoint when the same "
        "command is given again.",
    )
    train.add_argument(
        "config", type=Path, metavar="CONFIG.yaml", help="describes the run; its keys are below"
    )
    _add_set(train)
    train.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from the last checkpoint in `out`, if there is one (default: yes)",
    )
    train.more = lambda: _keys("gac.train_config", "TrainConfig")
    train.set_defaults(run=_train)


def _add_eval(commands: argparse._SubParsersAction) -> None:
    evaluate = commands.add_parser(
        "eval",
        usage="%(prog)s [CONFIG.yaml] [--set KEY=VALUE ...]",
        help="measure a model's accuracy on held-out prompts",
        description="Let a model answer prompts and score the answers: a single task (key "
        "`settings`), printed as a JSON object, or several (`tasks`), kept in `out` with every "
        "answer and shown as a table.",
    )
    evaluate.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG.yaml", help="optional; its keys are below"
    )
    evaluate.add_argument(
        "--against", type=Path, metavar="RESULTS",
        help="the `out` of another evaluation: also give paired differences over shared prompts",
    )  # fmt: skip
    _add_set(evaluate)
    evaluate.more = lambda: _keys("gac.evaluation.suite", "EvalConfig")
    evaluate.set_defaults(run=_eval)


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint's model as a transformers folder",
        description="Write a folder that transformers' from_pretrained loads, however many "
        "processes trained the model. Adapters are merged into it.",
    )
    export.add_argument("source", type=Path, metavar="RUN", help="a run directory")
    export.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    export.add_argument(
        "--step", type=_step, metavar="N|best",
        help="which checkpoint: its step, or best, the most accurate of the evaluated ones "
        "(default: the last intact one)",
    )  # fmt: skip
    export.set_defaults(run=_export)


def _step(text: str) -> int | Literal["best"]:
    try:
        return "best" if text == "best" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor best") from None


def _add_replay(commands: argparse._SubParsersAction) -> None:
    replay = commands.add_parser(
        "replay",
        help="compute a skipped step again and name the rows that broke it",
        description="A step whose loss or gradient was not finite or too large is skipped and kept "
        "under RUN/replay. Print what was recorded, what comes out now and the rows at fault.",
    )
    replay.add_argument("step", type=Path, metavar="RUN/replay/step-N", help="a kept step")
    replay.set_defaults(run=_replay)


def _add_report(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser(
        "report",
        help="write a page with plots and tables about one or more runs",
        description="Write report.html (one file, opens without a network) and plots/*.png, and "
        "print the tables. Runs that differ only by their seed are shown as one; unfinished runs "
        "are shown as far as they got.",
    )
    report.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a run directory, an `out` of gac eval, or a folder of them",
    )
    report.add_argument(
        "--out", type=Path, metavar="DIR", help="where to (default: the folder common to the runs)"
    )
    report.set_defaults(run=_report)


def _add_rewards(commands: argparse._SubParsersAction) -> None:
    rewards = commands.add_parser(
        "rewards",
        help="check a data set's own solutions against its reward",
        description="Try rewards without a model.",
    )
    check = rewards.add_subparsers(title="commands", metavar="COMMAND", required=True).add_parser(
        "check",
        help="score every row's own solution and name the rows that fail",
        description="Score every row's own solution by the configuration's reward and name the "
        "rows that fail: a model could not do better on them.",
    )
    check.add_argument("config", type=Path, metavar="CONFIG.yaml", help="as for train or eval")
    check.add_argument(
        "--least", type=float, default=1.0, help="what a solution should earn (default: 1)"
    )
    _add_set(check)
    check.set_defaults(run=_check_rewards)


def _add_methods(commands: argparse._SubParsersAction) -> None:
    methods = commands.add_parser(
        "methods",
        help="list the methods, or explain one",
        description="List the methods; with a NAME, say what it does and which keys it has.",
    )
    methods.add_argument("name", nargs="?", metavar="NAME", help="one method")
    methods.set_defaults(run=_methods)


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a tiny model by several methods and compare them",
        description="Train a tiny base model, post-train it by several methods and compare them. "
        "What is finished is not run again; what was interrupted goes on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of all runs")
    demo.add_argument("--methods", nargs="+", default=list(COMPARED), help="see `gac methods`")
    demo.add_argument("--seeds", type=int, default=1, help="seeds per method")
    demo.add_argument("--steps", type=int, default=160, help="optimiser steps per method")
    demo.add_argument("--jobs", type=int, default=None, help="runs at a time; None: one per core")
    demo.set_defaults(run=_demo)


def _add_set(parser: argparse.ArgumentParser) -> None:
    # extend, so that both `--set a=1 b=2` and `--set a=1 --set b=2` work
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=SET_HELP
    )


def _train(options: argparse.Namespace) -> int:
    from gac.config import load
    from gac.train_config import TrainConfig

    config = load(TrainConfig, options.config, options.set)  # before anything slow is imported
    _show_log()
    from gac.parallel import setup
    from gac.training.trainer import Trainer

    with refusals_are(ConfigError):  # what set-up refuses is the configuration's fault
        trainer = Trainer(config, options.resume)
    run, main_process = trainer.run(), trainer.accelerator.is_main_process
    del trainer  # DDP's destructor needs the process group
    setup.leave()
    if main_process:
        from gac.report import write_report

        print(f"The run: {run}\nThe report: {write_report([run], run)}")
    return OK


def _eval(options: argparse.Namespace) -> int:
    from gac.config import load
    from gac.evaluation.suite import EvalConfig, evaluate_single, run_suite
    from gac.evaluation.table import results_table

    config = load(EvalConfig, options.config or {}, options.set)
    if options.against and not config.tasks:
        raise ConfigError("--against compares tasks: write the data set as one of `tasks`")
    _show_log()
    if config.tasks:
        text = results_table(run_suite(config, options.against))
    else:
        text = json.dumps(evaluate_single(config), indent=2)
    if os.environ.get("RANK", "0") == "0":
        print(text)
    return OK


def _export(options: argparse.Namespace) -> int:
    from gac.export import export_run

    print(f"{export_run(options.source, options.out, options.step)} -> {options.out}")
    return OK


def _replay(options: argparse.Namespace) -> int:
    from gac.faults.replay import replay

    print(json.dumps(replay(options.step), indent=2))
    return OK


def _report(options: argparse.Namespace) -> int:
    from gac.report import find_folders, results_table, write_report

    folders = find_folders(options.runs)
    out = options.out or Path(os.path.commonpath([folder.resolve() for folder in folders]))
    page = write_report(folders, writable_folder("--out", out))
    print(f"{results_table(folders)}\n\nThe page: {page}")
    return OK


def _check_rewards(options: argparse.Namespace) -> int:
    from gac.rewards.check import check

    _show_log()
    found = check(options.config, options.set, options.least)
    for failing in found.failing:
        print(failing)
    events = ", ".join(f"{count} {name}" for name, count in found.counts.items() if count)
    passed = found.rows - len(found.failing)
    print(f"{passed} of {found.rows} rows pass{f' ({events})' if events else ''}")
    return FAILED if found.failing else OK


def _methods(options: argparse.Namespace) -> int:
    name = options.name
    if name is None:
        print(remembered("methods", _methods_table))
    elif re.fullmatch(r"[a-z0-9-]+", name):
        print(remembered(f"method-{name}", lambda: _method(name)))
    else:
        raise ConfigError(f"{name!r} is no method's name: `gac methods` lists them")
    return OK


def _methods_table() -> str:
    from gac.methods.listing import methods_table

    return methods_table()


def _method(name: str) -> str:
    from gac.config import choose, describe
    from gac.methods import METHODS

    method = type(choose(METHODS, name))
    keys = describe(method, "method") or "It has no hyperparameters."
    return f"{name}: {' '.join((method.__doc__ or '').split())}\n\n{keys}"


def _demo(options: argparse.Namespace) -> int:
    for name in ("seeds", "steps", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value}: use a number >= 1")
    from gac.demo.run import run_demo

    seeds = range(options.seeds)
    return run_demo(options.out, options.methods, seeds, options.steps, options.jobs)


def _keys(module: str, name: str) -> str:
    """The help of a configuration class."""

    def make() -> str:
        from importlib import import_module

        from gac.config import describe
        from gac.rewards import rewards_table

        keys = describe(getattr(import_module(module), name))
        return f"configuration keys:\n\n{keys}\n\n{rewards_table()}"

    return remembered(f"keys-{name}", make)


def _show_log() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if os.environ.get("RANK", "0") == "0":  # once, not by each process
        logging.getLogger("gac").setLevel(logging.INFO)  # e.g. what the length filters dropped


if __name__ == "__main__":
    sys.exit(main())
