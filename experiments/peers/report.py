"""The tables and the picture."""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

from problem import PROBLEMS

COMMON = "jax/scan"
LOOPS = {
    "jax": "jax/scan",
    "jpipe": "jax/scan",
    "spectrax": "spectrax/scan",
    "torch": "torch/loop-1-thread",
}
SPLITS = {"jax": "jax/split", "jpipe": "jax/split", "spectrax": "spectrax/split"}
PICTURED = {
    "jax/scan": "k.-",
    "jax/gpipe/none": "C1o-",
    "jax/gpipe/stage": "C1o--",
    "jax/shift/none": "C8^-",
    "jax/shift/stage": "C8^--",
    "spectrax/std-1f1b": "C2s--",
    "torch/1f1b": "C3D-",
    "torch/interleaved-1f1b": "C3v-",
    "jpipe/1f1b/none": "C0o-",
    "jpipe/1f1b/stage": "C0o--",
    "jpipe/interleaved/none": "C9^-",
    "jpipe/interleaved/stage": "C9^--",
    "jpipe/zero-bubble/none": "C4s-",
    "jpipe/zero-bubble-v/none": "C6v-",
}
"""What the picture shows, in which style; dashed is recompute."""
LEGEND = """\
Contenders are named framework/method/recompute. `jax` is written by hand: `scan`, one device that
accumulates gradients without recompute, the baseline of all; `split`, one device that runs the
stages as programs of their own from Python, each computed again in its backward; `gpipe`, autodiff
of scan and ppermute; `shift`, vmap over stages and a roll. CPU time is summed over all stages, and
its ratios are to the framework's own loop, to its own `split`, and to `jax/scan`. Memory of a
device beside its parameters is (c) temporary bytes of the compiled program, (l) the peak of live
arrays on the fullest device, without what a running program needs, or (p) the growth of the
largest process. Resident is how far all processes grow during a step that has run before.
"""


@dataclasses.dataclass
class Result:
    """One contender at one number of microbatches.

    Attributes:
        cpu: median seconds, of all processes together.
        wall: median seconds.
        memory: bytes by how they were found: `compiled`, `live`, `process`, `resident`.
        error: why there is nothing.
    """

    contender: str
    problem: str
    microbatches: int
    loss: float | None = None
    grad_norm: float | None = None
    cpu: float | None = None
    wall: float | None = None
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    error: str = ""

    def row(self) -> dict[str, Any]:
        """For a line of JSON."""
        return dataclasses.asdict(self)

    @property
    def device_bytes(self) -> tuple[str, int] | None:
        """How the memory of one device was found, and what it is."""
        found = [(k, self.memory[k]) for k in ("compiled", "live", "process") if k in self.memory]
        return found[0] if found else None


def baselines(contender: str) -> tuple[str, str | None, str]:
    """What a contender is held against: its framework's loop, its `split`, and the common."""
    family = contender.split("/")[0]
    return LOOPS[family], SPLITS.get(family), COMMON


def ratio(result: Result, base: str | None, results: Iterable[Result]) -> float | None:
    """CPU time over that of another contender at the same number of microbatches."""
    key = result.problem, result.microbatches, base
    for other in results:
        if (other.problem, other.microbatches, other.contender) == key and other.cpu and result.cpu:
            return result.cpu / other.cpu
    return None


def write(
    path: pathlib.Path, facts: dict[str, Any], results: list[Result], failures: dict[str, str]
) -> None:
    """Write the tables."""
    versions = {n: v for f in LOOPS for n, v in facts.get(f, {}).items() if f != "spectrax"}
    spectrax = facts.get("spectrax", {})
    lines = [
        "# jpipe beside other pipelines",
        "",
        f"{facts['date']}. {facts['cores']} cores of {facts['processor']}, load "
        f"{facts['load_before']} before the start; Python {facts['python']}, {_listed(versions)}; "
        f"{_listed(spectrax)} in the environment of SpectraX. `{facts['command']}`",
        "",
        "GPT of 8 blocks, width 256, 8 heads, sequence 128, vocabulary 256; microbatches of 2; "
        "four stages; float32; loss and gradients. A stage of torch is a process with one thread. "
        f"Medians of {facts['rounds']} rounds, interleaved.",
        "",
        LEGEND,
    ]
    for count in sorted({r.microbatches for r in results if r.problem == "gpt"}):
        lines += [f"## M = {count}", "", *_table(count, results), ""]
    for name in dict.fromkeys(r.problem for r in results if r.problem != "gpt"):
        lines += [*_overhead(name, [r for r in results if r.problem == name]), ""]
    for result in results:
        if result.error:
            failures[f"{result.contender}, {result.problem}, M = {result.microbatches}"] = (
                result.error
            )
    if failures:
        lines += ["## What did not run", ""]
        lines += [f"- {what}: {' '.join(why.split())}" for what, why in failures.items()]
    path.write_text("\n".join(lines).rstrip() + "\n")


def _table(count: int, results: list[Result]) -> Iterable[str]:
    yield (
        "| contender | CPU s | own loop | own split | jax/scan | wall s "
        "| MB a device | resident MB | loss | gradient norm |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for r in results:
        if r.problem != "gpt" or r.microbatches != count or r.error:
            continue
        ratios = [ratio(r, base, results) for base in baselines(r.contender)]
        yield (
            "| "
            + " | ".join(
                [
                    f"`{r.contender}`",
                    _number(r.cpu),
                    *map(_number, ratios),
                    _number(r.wall),
                    _memory(r),
                    f"{r.memory['resident'] / 1e6:.0f}",
                    f"{r.loss:.6f}",
                    f"{r.grad_norm:.6f}",
                ]
            )
            + " |"
        )


def _overhead(name: str, results: list[Result]) -> Iterable[str]:
    counts = sorted({r.microbatches for r in results})
    size = PROBLEMS[name]
    yield f"## Next to no arithmetic: width {size.width}, sequence {size.context}"
    yield ""
    yield f"All else the same, but heads: {size.heads}. Milliseconds of a step: wall (CPU)."
    yield ""
    yield "| contender | " + " | ".join(f"M = {count}" for count in counts) + " |"
    yield "|---|" + "---|" * len(counts)
    for contender in dict.fromkeys(r.contender for r in results):
        found = {r.microbatches: r for r in results if r.contender == contender and not r.error}
        cells = [
            f"{1e3 * found[count].wall:.1f} ({1e3 * found[count].cpu:.1f})"
            if count in found
            else "failed"
            for count in counts
        ]
        yield f"| `{contender}` | " + " | ".join(cells) + " |"


def _memory(result: Result) -> str:
    found = result.device_bytes
    return f"{found[1] / 1e6:.1f} ({found[0][0]})" if found else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def draw(path: pathlib.Path, results: list[Result]) -> None:
    """Draw CPU ratio and memory of the `PICTURED` against M."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [r for r in results if r.problem == "gpt" and r.contender in PICTURED and not r.error]
    for contender, style in PICTURED.items():
        mine = sorted((r for r in shown if r.contender == contender), key=lambda r: r.microbatches)
        counts = [r.microbatches for r in mine]
        if contender != COMMON:
            ratios = [ratio(r, baselines(contender)[0], results) for r in mine]
            left.plot(counts, ratios, style, label=contender)
        held = [r.device_bytes[1] / 1e6 if r.device_bytes else None for r in mine]
        right.plot(counts, held, style, label=contender)
    left.axhline(1, color="black", linewidth=1)
    left.set_title("CPU time over the framework's own one-device loop", fontsize=10)
    right.set_title("memory of a device beside parameters (MB)", fontsize=10)
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({r.microbatches for r in shown}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("microbatches")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path)
