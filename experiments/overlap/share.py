"""How much of the time exchanges between stages take, and how much of it a schedule hides.

    python experiments/overlap/share.py

Simulated: stages of GPT blocks on devices and links of published speeds. Writes RESULTS.md and
overlap.png beside this file. The article's bound is 15% of the time of computing.
"""

import argparse
import dataclasses
import datetime
import pathlib
from collections.abc import Sequence

from jpipe.schedule import CostModel, make_schedule, simulate_schedule

FOLDER = pathlib.Path(__file__).parent
BOUND = 0.15
STAGES, MICROBATCHES = 8, 32
CHUNKS = {"interleaved": 2, "zero-bubble-v": 2}
SCHEDULES = [
    *("1f1b", "1f1b-overlap", "interleaved"),
    *("zero-bubble", "zero-bubble-overlap", "zero-bubble-v"),
]
WIDTHS = [256, 512, 1024, 2048, 4096, 8192]
TOKENS = [256, 1024, 4096]  # of a microbatch


@dataclasses.dataclass(frozen=True)
class Link:
    """A device, and what joins it to its neighbour.

    Attributes:
        name: what it is.
        bytes_per_second: one way.
        latency: seconds from start to end of an exchange of nothing; an assumption.
        flops: peak floating-point operations per second of the device in bfloat16, dense.
    """

    name: str
    bytes_per_second: float
    latency: float
    flops: float


# NVIDIA H100 SXM datasheet: 989e12 dense operations per second, NVLink 900e9 bytes per second both
# ways, PCIe Gen5 128e9 both ways; InfiniBand NDR: 400e9 bits per second. Google Cloud
# documentation of TPU v5p and v5e: 459e12 and 197e12; one way over one link 90e9 and 45e9 bytes per
# second (Austin et al., "How to Scale Your Model", 2025).
LINKS = [
    Link("H100, NVLink", 450e9, 3e-6, 989e12),
    Link("H100, PCIe 5", 64e9, 5e-6, 989e12),
    Link("H100, InfiniBand", 50e9, 8e-6, 989e12),
    Link("TPU v5p, ICI", 90e9, 2e-6, 459e12),
    Link("TPU v5e, ICI", 45e9, 2e-6, 197e12),
]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a stage computes: GPT blocks in bfloat16.

    Attributes:
        blocks: how many.
        width: features per token.
        tokens: of a microbatch.
        context: tokens that attend to each other.
        utilization: the share of the device's peak that is reached.
    """

    blocks: int
    width: int
    tokens: int
    context: int
    utilization: float

    def forward_seconds(self, link: Link) -> float:
        """Time of a forward: 12 products of width x width a token, and those of attention."""
        of_token = 24 * self.width**2 + 4 * min(self.context, self.tokens) * self.width
        return self.blocks * self.tokens * of_token / (link.flops * self.utilization)

    def exchange_seconds(self, link: Link) -> float:
        """Time to pass one microbatch's activation on."""
        return link.latency + 2 * self.tokens * self.width / link.bytes_per_second


def exposed(name: str, stage: Stage, link: Link) -> float:
    """How much longer a step takes than without exchanges, over the time of computing."""
    num_chunks = CHUNKS.get(name, 1)
    schedule = make_schedule(name, STAGES, MICROBATCHES, num_chunks)
    forward = stage.forward_seconds(link)
    with_links, without = (
        simulate_schedule(schedule, CostModel(forward, 2 * forward, seconds)).makespan
        for seconds in (stage.exchange_seconds(link), 0.0)
    )
    return (with_links - without) / (MICROBATCHES * 3 * forward)


def least_width(
    name: str, blocks: int, tokens: int, link: Link, options: argparse.Namespace
) -> str:
    """The least width at which a schedule meets the bound."""
    for width in WIDTHS:
        stage = Stage(blocks, width, tokens, options.context, options.utilization)
        if exposed(name, stage, link) <= BOUND:
            return f"{width:,}"
    return f"above {WIDTHS[-1]:,}"


def report(options: argparse.Namespace) -> str:
    """The tables."""
    lines = [
        "# Exchanges beside computing",
        "",
        f"{datetime.date.today()}, simulated: P = {STAGES}, M = {MICROBATCHES}, GPT blocks in "
        f"bfloat16 at {options.utilization:.0%} of the device's peak, context {options.context}, "
        "a backward takes two forwards. `python experiments/overlap/share.py`",
        "",
        f"Least width from which a step is at most {BOUND:.0%} of its computing longer than with "
        f"links that cost nothing, with {options.blocks} blocks on a stage; `interleaved` and "
        "`zero-bubble-v` have two chunks.",
        "",
        "| link | tokens of a microbatch | " + " | ".join(f"`{s}`" for s in SCHEDULES) + " |",
        "|---|---|" + "---|" * len(SCHEDULES),
    ]
    for link in LINKS:
        for tokens in TOKENS:
            found = [least_width(s, options.blocks, tokens, link, options) for s in SCHEDULES]
            lines.append(f"| {link.name} | {tokens:,} | " + " | ".join(found) + " |")
    lines += [
        "",
        f"The same share by width, microbatches of {TOKENS[1]:,} tokens:",
        "",
        "| link | width | exchange over forward | "
        + " | ".join(f"`{s}`" for s in SCHEDULES)
        + " |",
        "|---|---|---|" + "---|" * len(SCHEDULES),
    ]
    for link in LINKS:
        for width in (512, 2048, 8192):
            stage = Stage(options.blocks, width, TOKENS[1], options.context, options.utilization)
            ratio = stage.exchange_seconds(link) / stage.forward_seconds(link)
            shares = [f"{exposed(s, stage, link):.1%}" for s in SCHEDULES]
            lines.append(f"| {link.name} | {width:,} | {ratio:.3f} | " + " | ".join(shares) + " |")
    return "\n".join(lines) + "\n"


def draw(options: argparse.Namespace, names: Sequence[str] = ("1f1b", "1f1b-overlap")) -> None:
    """Exposed share by width, for two schedules."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        for link in LINKS:
            shares = [
                100
                * exposed(
                    name,
                    Stage(options.blocks, width, TOKENS[1], options.context, options.utilization),
                    link,
                )
                for width in WIDTHS
            ]
            axes.plot(WIDTHS, shares, "o-", label=link.name, markersize=4)
        axes.axhline(100 * BOUND, color="0.5", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(WIDTHS, [f"{width:,}" for width in WIDTHS])
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_yticks([0, 0.1, 1, 10], ["0", "0.1", "1", "10"])
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("width")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.axes[0].set_ylabel("exchanges not hidden (% of computing)")
    figure.axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(FOLDER / "overlap.png")


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4, help="blocks on a stage")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--utilization", type=float, default=0.5)
    options = parser.parse_args()
    text = report(options)
    print(text)
    (FOLDER / "RESULTS.md").write_text(text)
    draw(options)


if __name__ == "__main__":
    main()
