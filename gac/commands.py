"""Commands as decorated functions, the parser of their arguments, and signals."""

import argparse
import signal
from collections.abc import Callable
from typing import Any, NoReturn

Run = Callable[[argparse.Namespace], int]
COMMANDS: dict[str, tuple[Run | None, tuple, str, dict[str, Any]]] = {}
"""Name -> function, arguments, configuration class in the help, and options of its parser."""


def argument(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An argument of a command, as for `argparse.ArgumentParser.add_argument`."""
    return names, options


def command(name: str, *arguments: Any, keys: str = "", **options: Any) -> Callable[[Run], Run]:
    """Make the decorated function run `gac NAME`.

    keys: `module:class` of the configuration whose keys the help lists.
    options: of the command's parser.
    """

    def register(run: Run) -> Run:
        COMMANDS[name] = run, arguments, keys, options
        return run

    return register


class Parser(argparse.ArgumentParser):
    """A parser that appends lazily generated text to its help."""

    extra_help: Callable[[], str] | None = None

    def error(self, message: str) -> NoReturn:
        if "unrecognized" in message:
            message += "; to override a key of a configuration: --set KEY=VALUE"
        super().error(message)

    def format_help(self) -> str:
        return super().format_help() + (f"\n{self.extra_help()}\n" if self.extra_help else "")


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)


class Version(argparse.Action):
    """Prints the version, which is looked up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from gac import __version__

        print(f"gac {__version__}")
        parser.exit()
