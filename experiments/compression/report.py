"""The tables and the picture."""

import datetime
import os
import pathlib
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata

import ablation
import numpy as np
from cases import (
    CLOSE,
    CONFIG,
    FINER,
    FREEZING,
    MAIN,
    MICROBATCH,
    MICROBATCHES,
    NONE,
    RATES,
    REPLICAS,
    SMOOTH,
    STAGES,
    Case,
    Result,
)

FOLDER = pathlib.Path(__file__).parent
Results = dict[Case, Result]


def write(
    results: Results, errors: dict[str, list[np.ndarray]], steps: int, seconds: float
) -> None:
    """Write RESULTS.md."""
    versions = ", ".join(f"{n} {metadata.version(n)}" for n in ("jax", "flax", "optax"))
    lines = [
        "# Compressed gradients",
        "",
        f"{datetime.date.today()}. {STAGES} stages x {REPLICAS} replicas simulated on a CPU with "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"{versions}. `python experiments/compression/measure.py --steps {steps}`, "
        f"{seconds / 60:.0f} minutes of CPU time.",
        "",
        f"GPT of {CONFIG.layers} layers, width {CONFIG.width}, context {CONFIG.context}, the help "
        f"topics of Python; 1F1B, {MICROBATCHES} microbatches of {MICROBATCH} examples over all "
        f"replicas, {steps} steps, the optimizer of the command. Losses in nats per byte.",
        "",
        "## Training",
        "",
        "Bytes are what one device sends over `data` in a step, counted in the compiled program: "
        "in an all-to-all all but its own part, in an all-gather its part to each of the others, "
        "in an all-reduce as a ring. `onebit-adam` sends float32 until its variance is frozen, by "
        "default after a fifth of the steps; its bytes are those of later steps, and the mean of "
        "all. Over none: at the same learning rate and seed.",
        "",
        *table(results, MAIN),
        "",
        *main_verdict(results),
        "",
        "![losses](compression.png)",
        "",
        "## How far these numbers can be trusted",
        "",
        "`none` at other learning rates, and another seed:",
        "",
        *table(results, NONE),
        "",
        "## Finer compression",
        "",
        *table(results, FINER),
        "",
        *finer_verdict(results),
        "",
        "## When to freeze the variance",
        "",
        "`onebit-adam` that never freezes is plain Adam with its b2; the learning rate rises over "
        "the first tenth of the steps.",
        "",
        *table(results, FREEZING),
        "",
        *freezing_verdict(results),
        "",
        "## Error feedback",
        "",
        f"Linear regression with {ablation.FEATURES} features, {ablation.WORKERS} workers that "
        f"disagree, batches of {ablation.BATCH}, {ablation.STEPS} steps of momentum SGD with a "
        f"learning rate that falls to 0, blocks of {ablation.BLOCK}; medians of "
        f"{len(ablation.SEEDS)} seeds. Excess: mean square error over all data beyond the least "
        "possible.",
        "",
        *ablation.report(errors),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (FOLDER / "RESULTS.md").write_text(text)


def table(results: Results, cases: Iterable[Case]) -> Iterator[str]:
    """A row for each case."""
    yield "| method | learning rate | validation loss | over none | bytes a step | none sends |"
    yield "|---|---|---|---|---|---|"
    for case in cases:
        found = results[case]
        ratio = found.bytes_last and results[case.beside].bytes_last / found.bytes_last
        mean = found.bytes_a_step
        average = f" (mean {mean:,.0f})" if found.frozen_at else ""
        yield (
            f"| {case.name}{frozen(case, found)} | {case.rate} | {found.validation:.4f} "
            f"| {over_none(results, case)} | {found.bytes_last:,.0f}{average} | {ratio:.1f} x |"
        )


def frozen(case: Case, found: Result) -> str:
    """After which step, where that is the question."""
    asked = case in FREEZING and found.frozen_at
    return f" (step {found.frozen_at})" if asked else ""


def over_none(results: Results, case: Case) -> str:
    """The validation loss beside that of `none`, as a table says it."""
    found = results[case]
    if not found.validation < found.losses[0]:
        return "diverges"
    return f"{excess(results, case):+.2%}"


def excess(results: Results, case: Case) -> float:
    """How much more the validation loss is than that of `none`, as a share."""
    return results[case].validation / results[case.beside].validation - 1


def close(results: Results, case: Case) -> bool:
    """Whether the goal is met."""
    return excess(results, case) <= CLOSE


def main_verdict(results: Results) -> Iterator[str]:
    """Which methods meet the goal."""
    for rate in RATES:
        own = [case for case in MAIN if case.rate == rate and case.method != "none"]
        met = [case.name for case in own if close(results, case)]
        missed = [
            f"{case.name} ({over_none(results, case)})" for case in own if not close(results, case)
        ]
        yield (
            f"- Learning rate {rate}: at most {CLOSE:.0%} over none (the goal): "
            f"{', '.join(met) or 'no method'}; missed by: {', '.join(missed) or 'none'}."
        )
    yield (
        "- `onebit` compresses the gradient, `onebit-adam` the momentum, to the same bytes. A mean "
        "of signs has one size for all numbers of a block, so Adam behind `onebit` finds one "
        "variance for all of them and no longer scales them apart, whatever is fed back; that is "
        "why 1-bit Adam freezes the variance first. `onebit` is for optimizers without a variance, "
        "such as SGD with momentum, see the last table."
    )


def finer_verdict(results: Results) -> Iterator[str]:
    """What it takes to meet the goal."""
    for method in ("onebit", "powersgd"):
        for rate in RATES:
            own = [c for c in (*MAIN, *FINER) if c.method == method and c.rate == rate]
            met = [case for case in own if close(results, case)]
            found = "no setting tried meets the goal"
            if met:
                least = min(met, key=lambda case: results[case].bytes_last)
                found = f"the fewest bytes that meet the goal: {least.name}"
            yield f"- `{method}` at {rate}: {found}."


def freezing_verdict(results: Results) -> Iterator[str]:
    """When freezing meets the goal, and when it diverges."""
    for rate in RATES:
        own = [c for c in FREEZING if c.rate == rate and results[c].frozen_at]
        own += [c for c in MAIN if c.method == "onebit-adam" and c.rate == rate]
        own.sort(key=lambda case: results[case].frozen_at or 0)
        groups = {
            "meets the goal": [c for c in own if close(results, c)],
            "misses it": [c for c in own if not close(results, c)],
        }
        told = "; ".join(
            f"{what}: {', '.join(f'step {results[c].frozen_at}' + _b2(c) for c in members)}"
            for what, members in groups.items()
            if members
        )
        yield f"- Learning rate {rate}, frozen after: {told}."


def _b2(case: Case) -> str:
    return "" if case.b2 is None else f" (b2 {case.b2})"


def draw(results: Results, errors: dict[str, list[np.ndarray]]) -> None:
    """Training losses at both learning rates, and the excess losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), dpi=120, layout="constrained")
    *losses, small = figure.subplots(1, 3)
    for axes, rate in zip(losses, RATES, strict=True):
        for case in MAIN:
            if case.rate == rate:
                smooth = results[case].smooth
                axes.plot(np.arange(len(smooth)) + SMOOTH, smooth, label=case.method, linewidth=1)
        axes.set_title(f"learning rate {rate}", fontsize=11)
        axes.set_ylim(top=4)
    losses[0].set_ylabel(f"training loss, mean of {SMOOTH} steps (nats per byte)")
    for name, by_seed in errors.items():
        small.plot(np.median(by_seed, 0), label=name, linewidth=1)
    start = max(by_seed[0][0] for by_seed in errors.values())
    small.set_yscale("log")
    small.set_ylim(top=10 * start)
    small.set_title("linear regression", fontsize=11)
    small.set_ylabel("excess loss")
    for axes in figure.axes:
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(FOLDER / "compression.png")
