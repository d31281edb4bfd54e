"""The main command: `python -m jpipe.train --mesh 4`."""

import io
import sys
from collections.abc import Sequence

from jpipe.cli import FAILED, INTERRUPTED, refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Train a model by pipeline parallelism.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit status: 0; 1 if the loss was not finite or a file could not be written; 2 for bad
        input, which one message on stderr explains; 130 if Ctrl-C ended the run early.
    """
    try:
        # Imported here because it takes seconds, during which Ctrl-C should end the command, too.
        from rich.console import Console

        from jpipe.processes import is_main
        from jpipe.train.cache import enable_compilation_cache
        from jpipe.train.options import parse_options
        from jpipe.train.run import Run
        from jpipe.train.setup import prepare

        try:
            setup = prepare(parse_options(argv))
        except ValueError as error:
            return refuse(error)
        enable_compilation_cache()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a picture must not end a run
        console = Console(markup=False, highlight=False, quiet=not is_main())
        return Run(setup, console).execute()
    except OSError as error:
        print(f"error: {error}; the run folder keeps what came before", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted at once; the run folder keeps what came before", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
