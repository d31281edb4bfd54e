"""The main command: `python -m jpipe.train --mesh 4`."""

import contextlib
import io
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from jpipe.cli import BAD_INPUT, CRASHED, FAILED, INTERRUPTED, refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Train a model by pipeline parallelism.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit status: 0; 1 if the loss was not finite or a file could not be written; 2 for bad
        input, which one message on stderr explains; 70 after an error that was not foreseen; 130 if
        Ctrl-C and 143 if SIGTERM ended the run early.
    """
    try:
        # Imported here because it takes seconds, during which Ctrl-C should end the command, too.
        from rich.console import Console

        from jpipe.processes import JoinError, is_main
        from jpipe.snapshot import MismatchError
        from jpipe.supervise import end_with_supervisor, is_supervised
        from jpipe.train.cache import enable_compilation_cache
        from jpipe.train.options import parse_options
        from jpipe.train.restart import run_and_restart, starts_group
        from jpipe.train.run import Run
        from jpipe.train.setup import prepare
        from jpipe.watchdog import Watchdog

        try:
            options = parse_options(argv)
            if not is_supervised() and (options.max_restarts or starts_group(options)):
                return run_and_restart(sys.argv[1:] if argv is None else argv, options)
            if is_supervised():
                end_with_supervisor()
        except ValueError as error:
            return refuse(error)
        with contextlib.closing(Watchdog(options.comm_timeout or None)) as watchdog:
            try:
                setup = prepare(options, watchdog)
            except ValueError as error:
                return refuse(error)
            except JoinError as error:
                print(f"error: {error}", file=sys.stderr)
                return CRASHED
            enable_compilation_cache()
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")  # a picture must not end a run
            console = Console(markup=False, highlight=False, quiet=not is_main())
            try:
                return Run(setup, console, watchdog).execute()
            except MismatchError as error:
                return refuse(error)
    except OSError as error:
        print(f"error: {error}; the run folder keeps what came before", file=sys.stderr)
        return FAILED
    except Exception:
        traceback.print_exc()
        return CRASHED
    except KeyboardInterrupt:
        print("interrupted at once; the run folder keeps what came before", file=sys.stderr)
        return INTERRUPTED


def _leave(status: int) -> NoReturn:
    """End the process."""
    if status in (FAILED, BAD_INPUT, CRASHED) and "jax" in sys.modules:
        from jpipe.processes import is_joined, leave

        if is_joined():
            leave(status)
    sys.exit(status)


if __name__ == "__main__":
    _leave(main())
