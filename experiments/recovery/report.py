"""The table and the picture; run by itself it writes them anew from recovery.json."""

import datetime
import json
import os
import platform
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from victim import ARGUMENTS, MICROBATCHES

FOLDER = Path(__file__).parent
WITHIN = 5  # microbatches between two snapshots
NAMES = {
    "scratch": "from scratch",
    "steps": "from the last step's snapshot",
    "within": f"from a snapshot every {WITHIN} microbatches",
}
LONGER = (1, 10, 60, 600)  # seconds a step


class Kill(NamedTuple):
    """One kill, and what came after it.

    Attributes:
        policy: what the run starts again from.
        failed_at: microbatches finished when it was killed.
        repeated: of these, how many were computed again.
        seconds: from the kill until as many were finished again.
        start_seconds: of these, until the new process had its programs, compiled or read.
    """

    policy: str
    failed_at: float
    repeated: float
    seconds: float
    start_seconds: float


def policies(every_steps: int) -> dict[str, list[str]]:
    """The command's arguments for each policy."""
    steps = ["--snapshot-every-steps", str(every_steps)]
    return {
        "scratch": ["--snapshot-every-steps", "0"],
        "steps": steps,
        "within": [*steps, "--snapshot-every-microbatches", str(WITHIN)],
    }


def write(data: dict[str, Any]) -> None:
    """Write RESULTS.md and recovery.png."""
    kills, options, seconds = [Kill(**k) for k in data["kills"]], data["options"], data["seconds"]
    by_policy = {name: [k for k in kills if k.policy == name] for name in NAMES}
    repeated = {n: statistics.mean(k.repeated for k in own) for n, own in by_policy.items()}
    wall = {n: statistics.mean(k.seconds for k in own) for n, own in by_policy.items()}
    starts = {n: statistics.mean(k.start_seconds for k in own) for n, own in by_policy.items()}
    versions = ", ".join(f"{n} {metadata.version(n)}" for n in ("jax", "orbax-checkpoint"))
    lines = [
        "# What a killed run loses",
        "",
        f"{datetime.date.today()}. {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, {versions}. `python experiments/recovery/measure.py "
        f"--kills {options['kills']} --steps {options['steps']} --every-steps "
        f"{options['every_steps']} --seed {options['seed']}`.",
        "",
        f"Processes of `python -m jpipe.train {' '.join(ARGUMENTS)} --steps {options['steps']}` "
        f"are ended by SIGKILL at {options['kills']} seeded random places, the same for every "
        f"policy, and started again at once, with a warm compilation cache. A step has "
        f"{MICROBATCHES} microbatches; step snapshots come every {options['every_steps']} steps, "
        "and the last policy takes them as well. How far a process was within a step is told by "
        "the clock. Microbatches are repeated between the place where a run goes on and that of "
        "the kill; the time is from the kill until the new process is there again.",
        "",
        "| policy | repeated microbatches: mean | median | standard deviation | seconds: mean "
        "| median | standard deviation | of the mean, until the programs are there |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, own in by_policy.items():
        cells = [
            f"{of([k.repeated for k in own]):.1f}"
            for of in (statistics.mean, statistics.median, statistics.stdev)
        ] + [
            f"{of([k.seconds for k in own]):.2f}"
            for of in (statistics.mean, statistics.median, statistics.stdev)
        ]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} | {starts[name]:.2f} |")
    lines += [
        "",
        "Snapshots within a step, against",
        "",
        *(
            f"- {NAMES[name]}: {1 - repeated['within'] / repeated[name]:.0%} less repeated work, "
            f"{1 - wall['within'] / wall[name]:.0%} less time."
            for name in ("scratch", "steps")
        ),
        "",
        f"What dominates is the start: {starts['within'] / wall['within']:.0%} of the time with "
        f"snapshots within a step, {starts['steps'] / wall['steps']:.0%} with those of steps: "
        "importing JAX and Flax, tracing, reading compiled programs. Snapshots within a step pay "
        "where steps are long. With these starts and means of repeated microbatches, modelled:",
        "",
        "| a step takes | from scratch | from the last step's snapshot | within a step "
        "| less than from the last step's |",
        "|---|---|---|---|---|",
    ]
    for step in LONGER:
        modelled = {n: starts[n] + repeated[n] * step / MICROBATCHES for n in NAMES}
        cells = " | ".join(f"{value:,.0f} s" for value in modelled.values())
        lines.append(f"| {step} s | {cells} | {1 - modelled['within'] / modelled['steps']:.0%} |")
    lines += [
        "",
        "What they cost while nothing happens: a step takes "
        + ", ".join(f"{seconds[n] * 1e3:.0f} ms ({NAMES[n]})" for n in NAMES)
        + f": {seconds['steps'] / seconds['scratch']:.2f} and "
        f"{seconds['within'] / seconds['scratch']:.2f} times that without snapshots. What is "
        "written within a step is as much for a step of any length.",
        "",
        "![repeated microbatches and seconds](recovery.png)",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (FOLDER / "RESULTS.md").write_text(text)
    draw(by_policy)


def draw(by_policy: dict[str, list[Kill]]) -> None:
    """Each kill as a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    work, wall = figure.subplots(1, 2)
    for axes, field, label in (
        (work, "repeated", "microbatches computed again"),
        (wall, "seconds", "seconds until the place of the kill"),
    ):
        for name, own in by_policy.items():
            at = [k.failed_at for k in own]
            axes.plot(at, [getattr(k, field) for k in own], ".", label=NAMES[name], markersize=5)
        axes.set_xlabel("microbatches finished when the run was killed")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.2)
    work.legend(frameon=False, fontsize=9)
    figure.savefig(FOLDER / "recovery.png")


if __name__ == "__main__":
    write(json.loads((FOLDER / "recovery.json").read_text()))
