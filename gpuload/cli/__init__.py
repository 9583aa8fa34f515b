"""The command line: ``gpuload demo | inspect | tune | bench | pack | doctor``.

Exit codes: 0 done; 1 a problem with the data or the machine (one sentence on stderr, no traceback); 2 wrong usage; 130
Ctrl-C. A command's module is imported when it runs, so that ``gpuload --help`` is fast and needs no optional package.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from gpuload import __version__
from gpuload.errors import GpuloadError, nearest
from gpuload.program import DONE, WRONG_USE, code_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

BROKEN_PIPE = 141

COMMANDS = {
    "demo": "train on minibatches from files on disk, read in three orders, and compare the results",
    "inspect": "show how a file is stored, and recommend block_size and fetch_factor",
    "tune": "find the fastest settings for a file on this machine, and save them",
    "bench": "measure cells per second, stage by stage, against the machine's limits",
    "pack": "write files to one shuffled, verified store that reads fastest and opens in anndata",
    "doctor": "check the installation, show the I/O path, and say how to get a faster one",
}

EPILOG = """\
examples:
  gpuload demo                                     from files to a trained model in under three minutes
  gpuload inspect atlas.h5ad --label cell_type     what the file holds, and how best to read it
  gpuload tune atlas.h5ad --label cell_type        its fastest settings on this machine
  gpuload bench atlas.h5ad --label cell_type       how fast this machine reads it
  gpuload pack atlas.h5ad atlas.zarr               a shuffled copy that reads fastest
  gpuload doctor                                   what a faster path needs

exit codes: 0 done, 1 a problem with the data or the machine, 2 wrong use, 130 interrupted

For help on a command: gpuload COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the process's arguments; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be valid text
    try:
        with _no_interrupt_lost():
            parser = build_parser(given)
            if not given:
                parser.print_help(sys.stderr)
                return WRONG_USE
            args = parser.parse_args(given)
            code = int(args.run(args))
            print(end="", flush=True)  # write errors surface here, not when the interpreter exits
            return code
    except SystemExit as exit_:
        # argparse exits this way, after reporting an error or showing the requested help.
        return int(exit_.code or DONE)
    except GpuloadError as error:
        print(f"gpuload {args.command}: {error}", file=sys.stderr)
        return code_of(error)
    except KeyboardInterrupt as error:
        print("gpuload: interrupted", file=sys.stderr)
        return code_of(error)
    except OSError as error:
        is_unread = isinstance(error, BrokenPipeError)  # the reader is gone
        if not is_unread:
            print(f"gpuload: {error}", file=sys.stderr)
        try:
            print(end="", flush=True)
        except OSError:  # keep the interpreter from failing again when it flushes at exit
            sys.stdout = None
        return BROKEN_PIPE if is_unread else code_of(error)


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Raise any KeyboardInterrupt at the end, whatever became of it, and soon if Python dropped it.

    Python only prints what is raised in a finalizer or a callback, and other code may catch it. The signal's handler
    remembers it, so that no interrupted command ends as if nothing had happened. If Python reports that it dropped it,
    the signal is sent again, so that a long command does not continue.
    """
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    came, is_over = False, False
    resent: list[threading.Timer] = []

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        try:
            if callable(handler):  # else this one is not set
                handler(number, frame)
        except KeyboardInterrupt:
            came = True
            if not is_over:  # at the end it would keep hooks and handlers from being restored; it is raised after that
                raise

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            resent.append(threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)))
            resent[-1].start()
        else:
            hook(unraisable)

    try:
        sys.unraisablehook = again
        # Not if the signal is ignored or ends the process at once; and only the main thread may set handlers.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, remember)
        yield
    except BrokenPipeError:
        raise
    except (Exception, SystemExit):
        if came:  # a library's error after its callback was interrupted is meaningless
            raise KeyboardInterrupt from None
        raise
    finally:
        is_over = True
        for timer in resent:  # none may be sent to our caller
            timer.cancel()
            with contextlib.suppress(RuntimeError):  # another interrupt kept it from starting
                timer.join()
        sys.unraisablehook = hook
        if signal.getsignal(signal.SIGINT) is remember:
            signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command: it refuses what it does not know itself, so that the usage shown is the command's."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments, of which none may be left over."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            said = f"unrecognized arguments: {' '.join(unknown)}"
            name = unknown[0].partition("=")[0]
            if not name.startswith("-") and self._get_positional_actions():
                self.error(f"{said}; give all paths together, before the options")
            near = nearest(name, [option for option in self._option_string_actions if option.startswith("--")])
            self.error(f"{said}; did you mean {near}?" if near else said)
        return found, unknown


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; only the command found in `argv` is imported and given its options."""
    parser = argparse.ArgumentParser(
        prog="gpuload",
        description="Load single-cell data from .h5ad files on disk as shuffled minibatches.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpuload {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, summary in COMMANDS.items():
        sentence = summary[0].upper() + summary[1:] + "."
        command = commands.add_parser(
            name, help=summary, description=sentence, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in argv:
            import_module(f"gpuload.cli.{name}").add_arguments(command)
    return parser
