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
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, NoReturn

from gac.demo.command import add_parser as add_demo
from gac.errors import (
    FAILED,
    USAGE,
    ConfigError,
    explain_missing_extra,
    user_message,
    writable_folder,
)
from gac.parallel.run_lock import first_to_report
from gac.study.command import add_parser as add_study

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
DEBUG_HELP = "show tracebacks for errors; same as GAC_DEBUG=1"


class Parser(argparse.ArgumentParser):
    """A parser that appends lazily generated text to its help."""

    extra_help: Callable[[], str] | None = None

    def error(self, message: str) -> NoReturn:
        if "unrecognized" in message:
            message += "; to override a key of a configuration: --set KEY=VALUE"
        super().error(message)

    def format_help(self) -> str:
        return super().format_help() + (f"\n{self.extra_help()}\n" if self.extra_help else "")


class Version(argparse.Action):
    """Prints the version, which is looked up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from gac import __version__

        print(f"gac {__version__}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argv: arguments without the program name."""
    debug = os.environ.get("GAC_DEBUG", "0") not in ("", "0")
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP threads spin only briefly before they sleep: without spinning, small models train
        # half as fast on idle cores; with more, many times slower on cores that others use as well
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
    try:
        with explain_missing_extra("this command"):
            options = make_parser().parse_args(argv)
            debug |= options.debug
            try:
                return options.run(options)
            except SystemExit as stop:  # from the user's own code
                from gac.config.imports import location

                print(
                    f"gac: the code called sys.exit({stop.code!r}){location(stop)}", file=sys.stderr
                )
                return FAILED
    except KeyboardInterrupt as stop:  # by the user, or by the user's own code
        from gac.config.imports import location

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
    parser.add_argument("--debug", action="store_true", default=False, help=DEBUG_HELP)
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_init(commands)
    _add_train(commands)
    _add_check(commands)
    _add_eval(commands)
    _add_export(commands)
    _add_replay(commands)
    _add_report(commands)
    _add_rewards(commands)
    _add_methods(commands)
    _add_models(commands)
    add_demo(commands)
    doctor = commands.add_parser(
        "doctor",
        help="show which backends and adapters work here, and why others do not",
        description="Print versions, devices, backends, the trainers whose versions are supported, "
        "and a self-test of each backend against float64.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)
    add_study(commands)
    for command in commands.choices.values():  # `gac --debug train` and `gac train --debug`
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG_HELP
        )
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from gac_kernels.doctor import main as doctor

    return doctor(["--json"] if options.json else [])


def _add_init(commands: argparse._SubParsersAction) -> None:
    init = commands.add_parser(
        "init",
        help="create a folder with everything for a first run",
        description="Write DIR/run.yaml with comments, data, a reward with a test and a tiny "
        "model. Nothing is downloaded. Then run `gac train DIR/run.yaml`.",
    )
    init.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    init.add_argument(
        "--model", metavar="NAME", help="folder or Hub name of a model, instead of a tiny one"
    )
    init.set_defaults(run=_init)


def _add_train(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser(
        "train",
        usage="%(prog)s CONFIG.yaml [--set KEY=VALUE ...] [--resume | --no-resume]",
        help="train a model from a configuration file",
        description="Train a model. All output, including a report, goes to the run directory "
        "`out`. Rerun the same command to resume an interrupted run from its last checkpoint.",
    )
    train.add_argument(
        "config",
        type=Path,
        metavar="CONFIG.yaml",
        help="run configuration; its keys are listed below",
    )
    _add_set(train)
    train.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="resume from the last checkpoint in `out`, if there is one (default: yes)",
    )
    train.extra_help = lambda: _keys("gac.train_config", "TrainConfig")
    train.set_defaults(run=_train)


def _add_check(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser(
        "check",
        help="check a configuration, its files and its reward without training",
    )
    check.add_argument("config", type=Path, metavar="CONFIG.yaml", help="run configuration")
    _add_set(check)
    check.set_defaults(run=_check)


def _add_eval(commands: argparse._SubParsersAction) -> None:
    evaluate = commands.add_parser(
        "eval",
        usage="%(prog)s [CONFIG.yaml] [--set KEY=VALUE ...]",
        help="measure a model's accuracy on held-out prompts",
        description="Generate and score a model's responses to prompts. The result of a single "
        "task (key `settings`) is printed as a JSON object. The results of several tasks (`tasks`) "
        "are saved to `out`, with all responses, and printed as a table.",
    )
    evaluate.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG.yaml",
        help="evaluation configuration (optional); its keys are listed below",
    )
    evaluate.add_argument(
        "--against",
        type=Path,
        metavar="RESULTS",
        help="`out` folder of an earlier evaluation; adds the paired difference on shared prompts",
    )
    _add_set(evaluate)
    evaluate.extra_help = lambda: _keys("gac.evaluation.config", "EvalConfig")
    evaluate.set_defaults(run=_eval)


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export",
        help="export a checkpoint's model as a transformers folder",
        description="Write a folder that transformers' from_pretrained can load, regardless of how "
        "many processes trained the model.",
    )
    export.add_argument("source", type=Path, metavar="RUN", help="a run directory")
    export.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    export.add_argument(
        "--step",
        type=_step,
        metavar="N|best",
        help="checkpoint to export: its step, or 'best' for the highest evaluation accuracy "
        "(default: the last intact checkpoint)",
    )
    export.add_argument(
        "--adapters",
        action="store_true",
        help="write only the adapters of model.lora, as peft does (default: merge them)",
    )
    export.set_defaults(run=_export)


def _step(text: str) -> int | Literal["best"]:
    try:
        return "best" if text == "best" else int(text)
    except ValueError:
        message = f"expected a step number or 'best', got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _add_replay(commands: argparse._SubParsersAction) -> None:
    replay = commands.add_parser(
        "replay",
        help="recompute a skipped step and list the rows that caused it",
        description="Steps with a non-finite or too large loss or gradient are skipped and saved "
        "under RUN/replay. Print the recorded values, the recomputed values and the rows at fault.",
    )
    replay.add_argument("step", type=Path, metavar="RUN/replay/step-N", help="a saved step")
    replay.set_defaults(run=_replay)


def _add_report(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser(
        "report",
        help="write a report with plots and tables for one or more runs",
        description="Write report.html (a single file that works offline) and plots/, and "
        "print the tables. Runs that differ only in their seed are grouped; runs need not be over.",
    )
    report.add_argument(
        "--watch",
        action="store_true",
        help="serve the report on this machine and reload it while the runs go on",
    )
    report.add_argument(
        "--port", type=int, default=0, help="serve it on this port (default: any free port)"
    )
    report.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a run directory, the `out` folder of gac eval, or a folder that contains these",
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: the common parent folder of the runs)",
    )
    report.set_defaults(run=_report)


def _add_rewards(commands: argparse._SubParsersAction) -> None:
    rewards = commands.add_parser(
        "rewards",
        help="check a dataset's reference solutions against its reward",
        description="Test rewards without a model.",
    )
    check = rewards.add_subparsers(title="commands", metavar="COMMAND", required=True).add_parser(
        "check",
        help="score each row's reference solution and list the rows that fail",
        description="Score each row's reference solution with the configured reward and list the "
        "rows that fail. No model can be expected to pass those rows.",
    )
    check.add_argument(
        "config", type=Path, metavar="CONFIG.yaml", help="a train or eval configuration"
    )
    check.add_argument(
        "--min-reward",
        type=float,
        default=1.0,
        help="minimum reward of a passing solution (default: 1)",
    )
    _add_set(check)
    check.set_defaults(run=_check_rewards)


def _add_methods(commands: argparse._SubParsersAction) -> None:
    methods = commands.add_parser(
        "methods",
        help="list the methods, or explain one",
        description="List the methods, or explain the method NAME and its keys.",
    )
    methods.add_argument(
        "name", nargs="?", metavar="NAME", help="method to explain, or package.module:Class"
    )
    methods.set_defaults(run=_methods)


def _add_models(commands: argparse._SubParsersAction) -> None:
    models = commands.add_parser(
        "models",
        help="list the tested model families",
        description="List the families of transformers and how each was tested: trained in every "
        "mode, or refused with a reason.",
    )
    models.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="part of a family's name, or a folder or Hub name of a model (OWNER/NAME)",
    )
    models.set_defaults(run=_models)


def _add_set(parser: argparse.ArgumentParser) -> None:
    # extend, so that both `--set a=1 b=2` and `--set a=1 --set b=2` work
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=SET_HELP
    )


def _init(options: argparse.Namespace) -> int:
    from gac.demo.project import create_project

    create_project(options.folder, options.model)
    print(f"Created {options.folder}. Next: gac train {options.folder}/run.yaml")
    return OK


def _check(options: argparse.Namespace) -> int:
    from gac.training.check import load_checked

    _, passed = load_checked("gac.train_config:TrainConfig", options.config, options.set)
    print("\n".join([*passed, "All checks passed."]))
    return OK


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


def _eval(options: argparse.Namespace) -> int:
    from gac.training.check import load_checked

    name = "gac.evaluation.config:EvalConfig"
    config, _ = load_checked(name, options.config, options.set)
    from gac.evaluation.suite import evaluate_single, run_suite
    from gac.evaluation.table import results_table

    if options.against and not config.tasks:
        raise ConfigError("--against requires `tasks`: move the dataset into `tasks`")
    _show_log()
    against = options.against
    result = run_suite(config, against) if config.tasks else evaluate_single(config)
    if os.environ.get("RANK", "0") == "0":
        print(results_table(result) if config.tasks else json.dumps(result, indent=2))
    return OK


def _export(options: argparse.Namespace) -> int:
    from gac.training.export import export_run

    path = export_run(options.source, options.out, options.step, options.adapters)
    print(f"{path} -> {options.out}")
    return OK


def _replay(options: argparse.Namespace) -> int:
    from gac.training.replay import replay

    print(json.dumps(replay(options.step), indent=2))
    return OK


def _report(options: argparse.Namespace) -> int:
    from gac.report import find_folders, results_table, write_report

    if options.watch or options.port:
        from gac.report.watch import serve

        return serve(options.runs, options.port)
    folders = find_folders(options.runs)
    out = options.out or Path(os.path.commonpath([folder.resolve() for folder in folders]))
    page = write_report(folders, writable_folder("--out", out))
    print(f"{results_table(folders)}\n\nReport: {page}")
    return OK


def _check_rewards(options: argparse.Namespace) -> int:
    from gac.config.imports import find_user_code
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


def _methods(options: argparse.Namespace) -> int:
    from gac.config.imports import find_user_code

    name = options.name
    if name is None:
        from gac.methods.listing import methods_table

        print(methods_table())
    else:
        find_user_code(None)
        from gac.methods.listing import method_page

        print(method_page(name))
    return OK


def _models(options: argparse.Namespace) -> int:
    from gac.models.families import families_table

    print(families_table(options.name))
    return OK


def _keys(module: str, name: str) -> str:
    """Help text for a configuration class."""
    from gac.config import describe
    from gac.rewards import rewards_table

    keys = describe(getattr(import_module(module), name))
    return f"configuration keys:\n\n{keys}\n\n{rewards_table()}"


def _show_log() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if os.environ.get("RANK", "0") == "0":  # log once, not in every process
        logging.getLogger("gac").setLevel(logging.INFO)  # e.g. numbers of dropped rows


if __name__ == "__main__":
    sys.exit(main())
