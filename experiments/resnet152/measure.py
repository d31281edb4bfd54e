"""How much shorter compression, release and overlap make the backward phase of ResNet-152.

    pip install -e '.[targets]'
    python experiments/resnet152/measure.py

Compiles for eight H100 without having them, simulates the phase from what the programs hold, and
times what compression computes on the CPU. Writes RESULTS.md and phase.png beside this file. What
is compiled is kept in a temporary folder: the first run takes half an hour on two cores. Quick:

    python experiments/resnet152/measure.py --model 18 --width 16 --image-size 64 --out /tmp/quick
"""

import argparse
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"

import cpu
import report
from phase import model_of
from targets import REPLICAS, STAGES, Problem, blocks_by_stage, compile_all

from jpipe.mesh import simulate_devices
from jpipe.models import ResNetConfig
from jpipe.models.resnet import DEPTHS
from jpipe.precision import POLICIES

METHODS = ["none", "bf16", "int8", "onebit"]


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--model", type=int, default=152, choices=DEPTHS, help="layers")
    found.add_argument("--width", type=int, default=64)
    found.add_argument("--image-size", type=int, default=224)
    found.add_argument("--microbatch-size", type=int, default=32, help="images of a replica")
    found.add_argument("--microbatches", type=int, default=8)
    found.add_argument("--efficiency", type=float, default=0.1, help="share of the peak reached")
    found.add_argument("--powersgd", action="store_true", help="too; compiles for five minutes")
    found.add_argument("--cpu-width", type=int, default=8)
    found.add_argument("--cpu-rounds", type=int, default=7)
    found.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    return found


def main() -> None:
    """Compile, simulate, measure and report."""
    options = parser().parse_args()
    if options.microbatches <= STAGES:
        parser().error(f"--microbatches {options.microbatches} must be more than {STAGES}")
    simulate_devices(STAGES * REPLICAS)
    config = ResNetConfig(
        depth=options.model,
        classes=1000,
        channels=3,
        width=options.width,
        small_images=False,
        policy=POLICIES["bf16"],
    )
    sizes = options.image_size, options.microbatch_size, options.microbatches
    problem = Problem(config, *sizes)
    methods = [*METHODS, "powersgd"] if options.powersgd else METHODS
    programs = compile_all(problem, methods)
    blocks = blocks_by_stage(problem)
    counts = {options.microbatches, 4 * options.microbatches}
    models = {
        (m, e): model_of(programs, blocks, m, e)
        for m in counts
        for e in {*report.EFFICIENCIES, options.efficiency}
    }
    small = ResNetConfig(depth=options.model, classes=10, channels=3, width=options.cpu_width)
    on_cpu = Problem(small, image_size=32, microbatch_size=2, num_microbatches=8)
    times = cpu.measure(on_cpu, methods, options.cpu_rounds)

    model = models[options.microbatches, options.efficiency]
    forced = report.unreleased_too_large(programs, blocks, models, options.efficiency)
    parts = [
        report.header(options, problem, programs, blocks),
        report.answer(model, forced),
        report.compiled_part(programs, problem),
        report.release_part(programs, blocks, problem),
        report.model_part(model),
        report.threshold_part(model, forced, models),
        report.cpu_part(on_cpu, times, options.cpu_rounds),
    ]
    text = "\n\n".join("\n".join(lines) for lines in parts) + "\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "RESULTS.md").write_text(text)
    report.draw(model, options.model, options.out / "phase.png")


if __name__ == "__main__":
    main()
