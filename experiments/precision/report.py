"""The tables and the picture."""

import argparse
import datetime
import os
import pathlib
import platform
from collections.abc import Iterator
from importlib import metadata

import numpy as np
from cases import (
    CASES,
    CLOSE,
    CONFIG,
    GROWTH_INTERVAL,
    MICROBATCH,
    MICROBATCHES,
    SMALL,
    SMALLER,
    SMOOTH,
    STAGES,
    TOKENS,
    Case,
    Curve,
)
from training import Loss16

FOLDER = pathlib.Path(__file__).parent


def report(
    curves: dict[Case, Curve],
    tables: dict[str, dict[float, Loss16]],
    options: argparse.Namespace,
    seconds: float,
) -> str:
    """The tables."""
    versions = ", ".join(f"{n} {metadata.version(n)}" for n in ("jax", "flax", "optax"))
    base = next(iter(curves.values()))
    lines = [
        "# Mixed precision and the loss scale",
        "",
        f"{datetime.date.today()}. {STAGES} stages simulated on a CPU with {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, {versions}. "
        f"`python experiments/precision/measure.py --steps {options.steps} --learning-rate "
        f"{options.learning_rate}`, {seconds / 60:.0f} minutes of CPU time.",
        "",
        f"GPT of {CONFIG.layers} layers, width {CONFIG.width}, context {CONFIG.context}, the help "
        f"topics of Python; 1F1B, {MICROBATCHES} microbatches of {MICROBATCH} examples, "
        f"{options.steps} steps, AdamW. On a CPU XLA multiplies float16 matrices in float32 and "
        "rounds the product to float16, as tensor cores do; it was told to leave out no rounding.",
        "",
        "## Training",
        "",
        "The weight multiplies the loss, and what AdamW and the clipping compare gradients with: "
        f"with a weight of 2^-8 activations have the gradients of a mean over {TOKENS / SMALL:,.0f}"
        f" tokens instead of {TOKENS}. Losses are given without it, in nats per byte. The gap is "
        f"the largest distance from the curve of fp32 of the same weight, both as running means "
        f"over {SMOOTH} steps. Constant scales skip no step; a dynamic one begins at 2^16 unless "
        f"said otherwise and grows after {GROWTH_INTERVAL} steps (by default after 2000).",
        "",
        "| weight | run | largest gap | validation loss | over fp32 | skipped | scale at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, curve in curves.items():
        beside = curves[Case("fp32", "fp32", case.weight)]
        last = power(curve.scales[-1]) if case.scale and curve.scales else ""
        if len(curve.losses) < options.steps:
            fate = f"not a number from step {len(curve.losses) + 1} on"
            lines.append(f"| {power(case.weight)} | {case.name} | | {fate} | | | {last} |")
            continue
        lines.append(
            f"| {power(case.weight)} | {case.name} | {gap(curve, beside):.4f} "
            f"| {curve.validation:.4f} | {curve.validation / beside.validation - 1:+.2%} "
            f"| {curve.skipped} | {last} |"
        )
    scaled = {c: v for c, v in curves.items() if c.precision == "fp16" and c.scale and c.dynamic}
    worst = max(abs(v.validation / base.validation - 1) for v in scaled.values())
    largest = max(
        gap(v, curves[Case("fp32", "fp32", c.weight)])
        for c, v in scaled.items()
        if not v.skipped_first
    )
    other = curves[CASES[1]]
    lines += [
        "",
        f"- With a dynamic scale float16 follows float32 at every weight: the largest gap is "
        f"{largest:.4f} nats, and validation is off by {worst:.2%} at most (goal: {CLOSE:.0%}, "
        f"{'met' if worst <= CLOSE else 'missed'}). Another seed of float32 is off by "
        f"{abs(other.validation / base.validation - 1):.2%}.",
        *(
            f"- {c.name}: the first {v.skipped_first} steps are skipped until nothing overflows, "
            "and the curve lags by as many; its gap is that lag, and not counted above."
            for c, v in scaled.items()
            if v.skipped_first
        ),
        *verdict(curves, tables),
        "",
        "![losses and scales](precision.png)",
    ]
    lines += [
        "",
        "## Gradients of one batch",
        "",
        "A weight acts as a loss scale of the same size. Lost: numbers that are zero in float16 "
        "and not in float32. Summed in float16: as a loop would that adds up the gradients of "
        "microbatches as they come and divides at the end; jpipe divides by M before, and sums in "
        "float32.",
    ]
    for title, table in tables.items():
        lines += [
            "",
            f"At {title}:",
            "",
            "| loss scale | lost | relative error | finite | finite if summed in float16 |",
            "|---|---|---|---|---|",
        ]
        for scale, found in table.items():
            error = f"{found.error:.2%}" if found.finite else ""
            lines.append(
                f"| {power(scale)} | {found.lost:.2%} | {error} | {_yes(found.finite)} "
                f"| {_yes(found.finite_half_sums)} |"
            )
    return "\n".join(lines) + "\n"


def verdict(curves: dict[Case, Curve], tables: dict[str, dict[float, Loss16]]) -> Iterator[str]:
    """What came of float16 without a scale and with sums in float16."""
    for weight in (1.0, SMALL, SMALLER):
        plain = curves[Case("fp16, no scale", "fp16", weight)]
        beside = curves[Case("fp32", "fp32", weight)]
        over = plain.validation / beside.validation - 1
        works = abs(over) <= CLOSE  # false of what is not a number
        yield (
            f"- Without a scale, weight {power(weight)}: float16 {'works' if works else 'fails'}, "
            f"validation {over:+.1%}."
        )
    for title, table in tables.items():
        most = max(scale for scale, found in table.items() if found.finite)
        most_half = max(scale for scale, found in table.items() if found.finite_half_sums)
        yield (
            f"- At {title} the largest scale tried that does not overflow is {power(most)}, but "
            f"{power(most_half)} if microbatches are summed in float16."
        )


def gap(curve: Curve, beside: Curve) -> float:
    """Largest distance of two smoothed curves."""
    return float(np.max(np.abs(curve.smooth - beside.smooth)))


def power(value: float) -> str:
    """A power of two, as a table says it."""
    return "1" if value == 1 else f"2^{np.log2(value):.0f}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def draw(curves: dict[Case, Curve]) -> None:
    """Losses with and without a weight, and scales."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), dpi=120, layout="constrained")
    plain, weighted, scales = figure.subplots(1, 3)
    for case, curve in curves.items():
        if case.seed:
            continue
        axes = plain if case.weight == 1 else weighted
        name = case.name if case.weight == 1 else f"{case.name}, weight {power(case.weight)}"
        if len(curve.losses) < SMOOTH:
            axes.plot([], [], "x", color="0.3", label=f"{name}: not a number")
            continue
        style = "-" if case.weight in (1, SMALLER) else "--"
        axes.plot(np.arange(len(curve.smooth)) + SMOOTH, curve.smooth, style, label=name)
        if case.scale and case.dynamic:
            scales.step(np.arange(len(curve.scales)) + 1, curve.scales, where="mid", label=name)
    scales.set_yscale("log", base=2)
    for axes, title in zip(
        (plain, weighted, scales),
        ("the loss as it is", "the loss times a small weight", "loss scale"),
        strict=True,
    ):
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.legend(frameon=False, fontsize=7)
    plain.set_ylabel(f"training loss, mean of {SMOOTH} steps (nats per byte)")
    figure.savefig(FOLDER / "precision.png")
