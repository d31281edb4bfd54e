"""A worker's side of the conversation: a JSON line in, a JSON line out."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class Runner(Protocol):
    """A contender, compiled for a problem and a number of microbatches."""

    def check(self) -> dict[str, float]:
        """Run once; the `loss` and the `grad_norm`."""
        ...

    def time(self) -> dict[str, float]:
        """Run once; seconds of `cpu` over all processes and of `wall`."""
        ...

    def memory(self) -> dict[str, int]:
        """Run once; bytes, by the names of the columns of `report.py`."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


Make = Callable[[str, str, int], Runner]
"""`(contender, problem, num_microbatches) -> Runner`"""


def serve(contenders: list[str], facts: dict[str, Any], make: Make) -> None:
    """Answer commands on standard input until it ends.

    A contender is made when first asked for, so that a worker that had to be started again goes on
    where the last one was.
    """
    # Libraries print; the answers keep the real standard output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ready: dict[tuple[str, str, int], Runner] = {}

    def answer(command: dict[str, Any]) -> Any:
        if command["op"] == "list":
            return {"contenders": contenders, "facts": facts}
        if command["op"] == "release":
            while ready:
                ready.popitem()[1].close()
            return {}
        key = command["contender"], command["problem"], command["microbatches"]
        if key not in ready:
            ready[key] = make(*key)
            ready[key].check()  # compiles and warms up
        return getattr(ready[key], command["op"])()

    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)
