"""What was found, as text and as a picture."""

import argparse
import datetime
import os
import pathlib
import platform
import sys
from importlib import metadata

import cpu
import jax
import numpy as np
from phase import (
    AGAIN,
    ALL,
    COMPRESSED,
    EACH,
    FASTEST,
    LINKS,
    MEMORY,
    NDR,
    NVLINK,
    OVERLAPPED,
    PEAK,
    PLAIN,
    Configuration,
    Link,
    Model,
    fastest_link,
    roof,
    saving,
)
from targets import REPLICAS, STAGES, Block, Problem, Programs, period

from jpipe.memory import format_bytes

TARGET = 0.37  # what the article reports
CAPACITY = 80e9  # bytes of memory of an H100
EFFICIENCIES = [0.05, 0.1, 0.2, 0.4]


def percent(share: float) -> str:
    """A share as people read it."""
    return f"{100 * share:.1f}%"


def rate(found: float | None) -> str:
    """A speed of a link."""
    if found is None:
        return "none"
    return "any" if found >= FASTEST else f"{found / 1e9:.3g} GB/s"


def milliseconds(seconds: float) -> str:
    """A time."""
    return f"{1e3 * seconds:.1f} ms"


def compiled_part(programs: Programs, problem: Problem) -> list[str]:
    """What the programs hold."""
    step, by_xla = programs.once[0], programs.by_xla[0]
    data = [e for e in step.exchanges if (e.axis, e.place) == ("data", "after")]
    sums = by_xla.sums_by_stage
    inside = [sum(e.wire_bytes for e in own) / period() for own in sums]
    hidden = [sum(e.beside for e in own) / period() for own in sums]
    beside = sum(e.beside for e in data)
    full, _ = programs.reductions["none"].over("data", "after")
    num_params = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    share_out, _ = step.over("stage", "after")
    lines = [
        "## Read from compiled programs",
        "",
        f"One sum of float32 gradients: {len(data)} all-reduces over `data` after the loop over "
        f"ticks, {format_bytes(sum(e.wire_bytes for e in data))} a step from each device, and "
        f"{step.over('data', 'in')[1]} in the loop, where all forwards and backwards are. While "
        f"they run, other operations move {format_bytes(beside)} of memory, "
        f"{milliseconds(beside / MEMORY)} at its full speed: nothing to hide behind. Gradients of "
        f"unequal stages are first shared out over `stage`: {format_bytes(share_out)}.",
        "",
        "So it is with `per_replica`, where batch statistics are those of a replica's own images. "
        f"Without, XLA sums in each microbatch, batch statistics too, with "
        f"{sum(inside) / num_params:.2f} bytes for a parameter (float32 would be 4): "
        f"{', '.join(format_bytes(b) for b in inside)} from a device of stage 0 to "
        f"{STAGES - 1}, in {', '.join(f'{len(own) / period():g}' for own in sums)} messages, for "
        f"each of the {problem.num_microbatches} microbatches. Beside them operations move "
        f"{', '.join(map(format_bytes, hidden))} of memory, which hides as much of their time.",
        "",
        "| reduction | on the wire, a device and step | of float32 | messages | memory moved |",
        "|---|---|---|---|---|",
    ]
    for name, program in programs.reductions.items():
        sent, messages = program.over("data", "after")
        lines.append(
            f"| {name} | {format_bytes(sent)} | {percent(sent / full)} | {messages} "
            f"| {format_bytes(program.traffic)} |"
        )
    lines += [
        "",
        "What is lost is fed back in the next step; what it does to training is not shown.",
    ]
    return lines


def kept_bytes(programs: Programs) -> float:
    """What the executor keeps of a microbatch on a device."""
    more = programs.gpipe_slots - STAGES
    return (programs.gpipe.temporary - programs.once[1].temporary) / more


def unreleased(programs: Programs, blocks: list[list[Block]], num_microbatches: int) -> float:
    """Bytes of a device that keeps all that `jax.vjp` saves, of all microbatches."""
    rest = programs.once[1].total - STAGES * kept_bytes(programs)
    return rest + num_microbatches * saved_bytes(blocks)


def saved_bytes(blocks: list[list[Block]]) -> int:
    """What `jax.vjp` saves of a microbatch of the largest stage."""
    return max(sum(b.saved_bytes for b in own) for own in blocks)


def unreleased_too_large(
    programs: Programs,
    blocks: list[list[Block]],
    models: dict[tuple[int, float], Model],
    efficiency: float,
) -> Model | None:
    """The model of the fewest microbatches, if any, that would not fit without release."""
    counts = sorted({m for m, _ in models})
    found = [m for m in counts if unreleased(programs, blocks, m) > CAPACITY]
    return models[found[0], efficiency] if found else None


def release_part(programs: Programs, blocks: list[list[Block]], problem: Problem) -> list[str]:
    """What layer-wise release saves."""
    m, kept, saved = problem.num_microbatches, kept_bytes(programs), saved_bytes(blocks)
    rest = unreleased(programs, blocks, 0)
    rows = [
        ("all that `jax.vjp` saves, of all microbatches", saved, rest + m * saved, saved),
        ("what the executor keeps, of all (`gpipe`)", kept, programs.gpipe.total, kept),
        (f"the same, of at most {STAGES} (`1f1b`)", kept, programs.once[1].total, 0),
    ]
    lines = [
        "## Layer-wise release",
        "",
        "Released is what no backward needs any more: the executor keeps a minimum cut of a stage, "
        "and `1f1b` of at most P microbatches. The last two rows are compiled; the first replaces "
        "what they keep by what `jax.vjp` saves of the largest stage.",
        "",
        f"| kept from forward to backward | of a microbatch | a device, M = {m} | largest M in "
        f"{format_bytes(CAPACITY)} |",
        "|---|---|---|---|",
    ]
    for name, each, total, growth in rows:
        most = f"{int((CAPACITY - rest) // growth)}" if growth else "any"
        lines.append(f"| {name} | {format_bytes(each)} | {format_bytes(total)} | {most} |")
    lines += [
        "",
        "Release spares no operation, so where all fits it changes bytes and no time. Where all "
        "would not fit, it spares recomputing the forwards.",
    ]
    return lines


def model_part(model: Model) -> list[str]:
    """The phase by link."""
    lines = [
        "## Modelled: the backward phase",
        "",
        "The time of a step until all gradients are averaged, less that of a pipeline of the "
        "forwards alone. Stages of a replica are joined by NVLink, replicas by the row's link. "
        "Overlap, which the compiled program lacks, shares out and averages the gradients of a "
        "block once its last backward is done, beside the rest of the backwards. XLA's sums are "
        "hidden by what it runs beside each of them.",
        "",
        "| link over `data` | XLA's sums | one sum | 1 bit | overlap | 1 bit and overlap | shorter "
        "than one sum: 1 bit | overlap | both | both, than XLA's sums |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for link in LINKS:
        times = [
            milliseconds(model.seconds(c, link)) for c in (EACH, PLAIN, COMPRESSED, OVERLAPPED, ALL)
        ]
        shorter = [percent(saving(model, PLAIN, c, link)) for c in (COMPRESSED, OVERLAPPED, ALL)]
        shorter.append(percent(saving(model, EACH, ALL, link)))
        name = f"{link.name}, {link.bytes_per_second / 1e9:g} GB/s"
        lines.append(f"| {name} | {' | '.join(times + shorter)} |")
    lines += ["", f"With a reduction that is free: {milliseconds(model.seconds(PLAIN, None))}."]
    return lines


def threshold_part(
    model: Model, forced: Model | None, models: dict[tuple[int, float], Model]
) -> list[str]:
    """From which link on the article's figure holds."""
    cases = {
        "1 bit, against one sum": (model, PLAIN, COMPRESSED),
        "int8, against one sum": (model, PLAIN, Configuration("int8")),
        "bfloat16, against one sum": (model, PLAIN, Configuration("bf16")),
        "overlap, against one sum": (model, PLAIN, OVERLAPPED),
        "1 bit and overlap, against one sum": (model, PLAIN, ALL),
        "1 bit and overlap, against XLA's sums": (model, EACH, ALL),
    }
    if forced:
        name = f"all three, M = {forced.num_microbatches}, against one sum and recomputing"
        cases[name] = (forced, AGAIN, ALL)
    lines = [
        f"## From which link on it is {TARGET:.0%}",
        "",
        f"The fastest link over `data` at which the phase is {TARGET:.0%} shorter, with the "
        "latency of InfiniBand; slower ones give more, but for overlap alone.",
        "",
        "| with | fastest link | over InfiniBand NDR |",
        "|---|---|---|",
    ]
    for name, case in cases.items():
        found = fastest_link(*case, TARGET, NDR.latency)
        lines.append(f"| {name} | {rate(found)} | {percent(saving(*case, NDR))} |")
    lines += [
        "",
        "1 bit and overlap against one sum, by the share of the peak that is reached and by M:",
        "",
        "| microbatches | " + " | ".join(f"{e:.0%} of peak" for e in EFFICIENCIES) + " |",
        "|---|" + "---|" * len(EFFICIENCIES),
    ]
    for m in sorted({m for m, _ in models}):
        found = [fastest_link(models[m, e], PLAIN, ALL, TARGET, NDR.latency) for e in EFFICIENCIES]
        lines.append(f"| {m} | {' | '.join(map(rate, found))} |")
    return lines


def cpu_part(problem: Problem, times: cpu.Times, rounds: int) -> list[str]:
    """What compression computes."""
    base = times.gradients + times.updates["none"]
    lines = [
        "## Measured: CPU time of a step",
        "",
        f"{STAGES * REPLICAS} devices simulated on the CPU, {problem.config.depth} layers of width "
        f"{problem.config.width}, images of {problem.image_size} x {problem.image_size}, "
        f"{problem.num_microbatches} microbatches of {problem.microbatch_size} images of each "
        f"replica, float32; medians of {rounds}. Loss and gradients take "
        f"{times.gradients:.2f} s, the same for all. There are no links to save bytes on: the "
        "ratio is what compression costs in computing.",
        "",
        "| reduction | reduction and update | step, over one without compression |",
        "|---|---|---|",
    ]
    for name, seconds in times.updates.items():
        ratio = (times.gradients + seconds) / base
        lines.append(f"| {name} | {milliseconds(seconds)} | {ratio:.3f} |")
    return lines


def header(
    options: argparse.Namespace, problem: Problem, programs: Programs, blocks: list[list[Block]]
) -> list[str]:
    """What it is about."""
    command = " ".join(["python experiments/resnet152/measure.py", *sys.argv[1:]])
    versions = ", ".join(
        f"{n} {metadata.version(n)}"
        for n in ("jax", "jaxlib", "flax", "optax", "jax-cuda12-plugin")
    )
    flops = [sum(b.forward + b.backward for b in own) for own in blocks]
    params = [sum(b.num_params for b in own) for own in blocks]
    return [
        f"# The backward phase of ResNet-{options.model}",
        "",
        f"{datetime.date.today()}; compiled for eight H100 and never run there; CPU: "
        f"{platform.machine()}, {os.cpu_count()} cores; {versions}. `{command}`",
        "",
        f"ResNet of {sum(params) / 1e6:.1f}e6 parameters, width {options.width}, images of "
        f"{options.image_size} x {options.image_size}, bfloat16 with float32 parameters, gradients "
        f"and norms; P = {STAGES} stages x {REPLICAS} replicas, `1f1b`, "
        f"M = {problem.num_microbatches} microbatches of {problem.microbatch_size} images of each "
        f"replica. Stages hold {', '.join(f'{p / 1e6:.1f}' for p in params)} million parameters; "
        f"forward and backward of a microbatch take {', '.join(f'{f / 1e9:.3g}' for f in flops)} "
        "Gflop, as XLA counts them before it compiles.",
        "",
        f"Times are modelled at {options.efficiency:.0%} of {PEAK / 1e12:.0f} Tflop/s, which is an "
        f"assumption: the compiled loop moves so much memory that at {MEMORY / 1e12} TB/s "
        f"{percent(roof(programs, blocks))} is the most it could reach.",
    ]


def answer(model: Model, forced: Model | None) -> list[str]:
    """The figures in short."""
    shorter, most = (
        {link: percent(share(link)) for link in (NVLINK, NDR)}
        for share in (
            lambda link: saving(model, PLAIN, ALL, link),
            lambda link: 1 - model.seconds(PLAIN, None) / model.seconds(PLAIN, link),
        )
    )
    limit = fastest_link(model, PLAIN, ALL, TARGET, NDR.latency)
    text = (
        f"1-bit gradients and overlap make the phase {shorter[NVLINK]} shorter over {NVLINK.name} "
        f"and {shorter[NDR]} over {NDR.name}, against one float32 sum after the backwards (a "
        f"reduction that is free: {most[NVLINK]} and {most[NDR]}); release changes bytes and no "
        f"time. The article's {TARGET:.0%} needs replicas joined at no more than {rate(limit)}. "
        "Against the sums in each microbatch that XLA makes of a model with batch norm, it is "
        f"{percent(saving(model, EACH, ALL, NDR))} over {NDR.name}."
    )
    if forced:
        text += (
            f" With M = {forced.num_microbatches}, where a baseline that releases nothing has to "
            f"recompute its forwards, all three give {percent(saving(forced, AGAIN, ALL, NDR))}."
        )
    return [f"**{text}**"]


def draw(model: Model, depth: int, path: pathlib.Path) -> None:
    """The phase by the speed of the link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    rates = np.geomspace(0.5e9, 600e9, 120)
    lines = {
        "XLA's sums in each microbatch": (EACH, "C3-"),
        "one float32 sum": (PLAIN, "C0-"),
        "1 bit": (COMPRESSED, "C1-"),
        "overlap": (OVERLAPPED, "C4-"),
        "1 bit and overlap": (ALL, "C2-"),
    }
    for label, (configuration, style) in lines.items():
        times = [1e3 * model.seconds(configuration, Link("", r, NDR.latency)) for r in rates]
        axes.plot(rates / 1e9, times, style, label=label)
        if configuration == PLAIN:
            goal = [(1 - TARGET) * t for t in times]
            axes.plot(rates / 1e9, goal, "C0:", label=f"{TARGET:.0%} below one sum")
    for link in LINKS:
        axes.axvline(link.bytes_per_second / 1e9, color="0.85", linewidth=0.8, zorder=0)
        axes.text(
            link.bytes_per_second / 1e9,
            0.99,
            link.name.replace(" Ethernet", "E").replace("InfiniBand ", ""),
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="right",
            va="top",
            fontsize=7,
            color="0.4",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("link over data (GB/s)")
    axes.set_ylabel("backward phase (ms), modelled")
    axes.set_title(
        f"ResNet-{depth}, {STAGES} stages x {REPLICAS} replicas, M = {model.num_microbatches}",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
