"""jpipe beside other pipelines, and all of them beside one device: time, memory and numbers.

    python experiments/peers/compare.py [--only 'jax/*' 'jpipe/1f1b/*'] [--rounds 5]

Every contender computes loss and gradients of the same GPT, parameters and tokens, in fp32. Each
framework runs in a virtual environment and a process of its own, kept for the whole comparison,
and the rounds of all contenders are interleaved. Stages share the machine's cores, so CPU time is
what counts: the work of all stages together. Prints JSON lines; writes RESULTS.md and peers.png.
"""

import argparse
import datetime
import fnmatch
import json
import os
import pathlib
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from problem import PROBLEMS, save_problem
from report import Result, baselines, draw, write
from venvs import REQUIREMENTS, python_with
from workers import Worker, WorkerError

FOLDER = pathlib.Path(__file__).parent


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venvs", type=pathlib.Path, default="~/.cache/jpipe/peers")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for any one answer")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER)
    args = parser.parse_args()

    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "experiments/peers/compare.py", *sys.argv[1:]]),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "rounds": args.rounds,
    }
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for problem in args.problems:
            save_problem(folder, problem, max(args.microbatches))
        workers, failures = {}, {}
        contenders: dict[str, Worker] = {}
        for framework in REQUIREMENTS:
            try:
                python = python_with(framework, args.venvs.expanduser())
                worker = Worker(python, FOLDER / f"worker_{framework}.py", folder)
                known = worker.ask(args.timeout, "list")
            except (RuntimeError, WorkerError) as error:
                failures[framework] = str(error)
                continue
            workers[framework] = worker
            facts[framework] = known["facts"]
            contenders |= dict.fromkeys(known["contenders"], worker)
        contenders = {c: contenders[c] for c in chosen(contenders, args.only)}
        print(json.dumps(facts), flush=True)
        try:
            for problem in args.problems:
                for count in args.microbatches:
                    for result in measure(contenders, problem, count, args.rounds, args.timeout):
                        print(json.dumps(result.row()), flush=True)
                        results.append(result)
                    for worker in workers.values():
                        worker.ask(args.timeout, "release")
        finally:
            for worker in workers.values():
                worker.stop()
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "RESULTS.md", facts, results, failures)
    draw(args.out / "peers.png", results)


def chosen(contenders: Iterable[str], patterns: list[str]) -> list[str]:
    """The contenders that match, and what they are held against; in the order they came."""
    wanted = {c for c in contenders if any(fnmatch.fnmatch(c, pattern) for pattern in patterns)}
    bases = {base for c in wanted for base in baselines(c)}
    return [c for c in contenders if c in wanted | bases]


def measure(
    contenders: dict[str, Worker], problem: str, count: int, rounds: int, timeout: float
) -> list[Result]:
    """All contenders at one number of microbatches, in turn."""
    results = [Result(contender, problem, count) for contender in contenders]

    def ask(result: Result, op: str) -> dict[str, Any]:
        """The answer, or nothing once a contender has failed."""
        if result.error:
            return {}
        key = {"contender": result.contender, "problem": problem, "microbatches": count}
        try:
            return contenders[result.contender].ask(timeout, op, **key)
        except WorkerError as error:
            result.error = str(error)
            return {}

    for result in results:
        print(f"compiling {result.contender} M={count} {problem}", file=sys.stderr, flush=True)
        for name, value in ask(result, "check").items():
            setattr(result, name, value)
    times: dict[str, list[dict[str, float]]] = {result.contender: [] for result in results}
    for round_ in range(rounds):
        print(f"round {round_ + 1} of {rounds}", file=sys.stderr, flush=True)
        for result in results:
            # A step that follows another, as in training: memory that lay free for a while may
            # have gone back to the machine, and costs more to get again than to reuse.
            ask(result, "time")
            times[result.contender].append(ask(result, "time"))
    for result in results:
        result.memory = ask(result, "memory")
        if not result.error:
            result.cpu = statistics.median(t["cpu"] for t in times[result.contender])
            result.wall = statistics.median(t["wall"] for t in times[result.contender])
    return results


def processor() -> str:
    """The name of this machine's processor."""
    info = pathlib.Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":")[1].strip() if names else "unknown"


if __name__ == "__main__":
    main()
