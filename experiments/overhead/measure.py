"""What the pipeline costs: CPU time of a step against plain gradient accumulation on one device.

    python experiments/overhead/measure.py [--microbatches 8] [--rounds 10] [--processes 1]

Both sides run the same model in the same process, in turn: loss and gradients, no optimizer, fp32.
The loop never recomputes. The stages are simulated devices that share the CPU's cores, so process
CPU time is what counts: it is the sum over all stages of the work they do. Prints JSON lines.

One process after another may come to other ratios, above all as the loop takes 1.3 s in one and
1.5 s in the next. With several processes the ratios of each are summed up at the end.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys

import jax
import numpy as np
from flax import nnx

from jpipe.adapters import FlaxPipeline, pipeline_from_nnx
from jpipe.mesh import make_mesh, simulate_devices
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.pipeline import Recompute, batch_sharding, param_shardings, pipeline_value_and_grad
from jpipe.reference import reference_value_and_grad
from jpipe.schedule import SCHEDULES

STAGES = 4
MICROBATCH = 2
CONFIG = GPTConfig(vocab_size=256, context=128, layers=8, width=256, heads=8)


def make_model(recompute: Recompute) -> FlaxPipeline:
    return pipeline_from_nnx(
        lambda rngs: GPT(CONFIG, rngs=rngs),
        stem="embedding",
        body="blocks",
        head="head",
        recompute=recompute,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    args = parser.parse_args()
    if args.processes > 1:
        measure_often(args.processes)
    else:
        measure(args)


def measure_often(processes: int) -> None:
    """Measure in one process after another, and sum up."""
    ratios: dict[str, list[float]] = {}
    for _ in range(processes):
        command = [sys.executable, *sys.argv, "--processes", "1"]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(printed, end="", flush=True)
        for row in map(json.loads, printed.splitlines()[1:]):
            name = f"{row['schedule']}, recompute {row['recompute']}"
            ratios.setdefault(name, []).append(row["cpu_ratio"])
    for name, values in ratios.items():
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        quartiles = [round(value, 3) for value in (lower, median, upper)]
        print(json.dumps({"program": name, "cpu_ratio_quartiles": quartiles}))


def measure(args: argparse.Namespace) -> None:
    """Measure in this process."""
    simulate_devices(STAGES)

    plain = make_model("none")
    params = jax.jit(lambda: plain.init(nnx.Rngs(0)))()
    shape = (args.microbatches, MICROBATCH, CONFIG.context + 1)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, shape, dtype=np.int32)
    batch = tokens[..., :-1], tokens[..., 1:]

    programs = {}
    loop = reference_value_and_grad(plain.stages, next_token_loss)
    here = jax.device_put((params, *batch), jax.devices()[0])
    programs["one device", "none"] = loop.lower(*here).compile(), here
    mesh = make_mesh(STAGES)
    there = (
        jax.device_put(params, param_shardings(mesh, params)),
        *jax.device_put(batch, batch_sharding(mesh)),
    )
    for schedule in args.schedules:
        for recompute in ("none", "stage"):
            stages = make_model(recompute).stages
            run = pipeline_value_and_grad(stages, next_token_loss, mesh, schedule)
            programs[schedule, recompute] = run.lower(*there).compile(), there

    used = {key: [] for key in programs}
    for round_ in range(args.rounds + 1):  # the first warms up
        for key, (program, arguments) in programs.items():
            # Training runs one step after the other. The first after a pause pays for memory that
            # the system took back meanwhile, the more the more a program needs: it does not count.
            jax.block_until_ready(program(*arguments))
            before = resource.getrusage(resource.RUSAGE_SELF)
            jax.block_until_ready(program(*arguments))
            after = resource.getrusage(resource.RUSAGE_SELF)
            if round_:
                used[key].append([b - a for a, b in zip(before, after, strict=True)])

    # The first fields: seconds in the program, seconds in the kernel for it.
    cpu = {key: statistics.median(sum(row[:2]) for row in rows) for key, rows in used.items()}
    system = {key: statistics.median(row[1] for row in rows) for key, rows in used.items()}
    facts = {
        "date": datetime.date.today().isoformat(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "stages": STAGES,
        "microbatches": args.microbatches,
        "rounds": args.rounds,
    }
    print(json.dumps(facts))
    for (schedule, recompute), (program, _) in programs.items():
        key = (schedule, recompute)
        row = {
            "schedule": schedule,
            "recompute": recompute,
            "cpu_ratio": round(cpu[key] / cpu["one device", "none"], 3),
            "cpu_seconds": round(cpu[key], 3),
            "of_it_in_the_kernel_seconds": round(system[key], 3),
            "temp_megabytes": round(program.memory_analysis().temp_size_in_bytes / 1e6, 1),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
