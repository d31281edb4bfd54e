"""What a killed run loses: from scratch, from the last step's snapshot, from one within a step.

    python experiments/recovery/measure.py [--kills 100]

Real processes of the command are ended by SIGKILL at seeded random places, the same for every
policy, and started again. Writes RESULTS.md, recovery.json and recovery.png beside this file.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from report import FOLDER, Kill, policies, write
from victim import ARGUMENTS, MICROBATCHES, Victim, seconds_a_step

PER_RUN = 10  # kills of one run


def undisturbed(folder: Path, arguments: list[str], steps: int) -> float:
    """Seconds a step takes."""
    command = [sys.executable, "-m", "jpipe.train", *ARGUMENTS, *arguments, "--out", str(folder)]
    subprocess.run([*command, "--steps", str(steps)], check=True, stdout=subprocess.DEVNULL)
    return seconds_a_step(folder)


def kills_of_a_run(
    policy: str, targets: list[float], folder: Path, arguments: list[str], step_seconds: float
) -> list[Kill]:
    """Kill a run at each of the targets, in turn; each start recovers from the kill before."""
    found: list[Kill] = []
    victim = Victim(folder, arguments, step_seconds)
    for target in targets:
        while victim.position() < target:
            time.sleep(0.002)
        failed_at = victim.position()
        victim.kill()
        killed = time.monotonic()
        if policy == "scratch":
            shutil.rmtree(folder)
        victim = Victim(folder, arguments, step_seconds)
        while victim.position() < failed_at:
            time.sleep(0.002)
        recovered = time.monotonic()
        assert victim.base is not None
        found.append(
            Kill(
                policy,
                failed_at,
                failed_at - victim.base,
                recovered - killed,
                victim.compiled - killed,
            )
        )
        print(found[-1], flush=True)
    victim.kill()
    return found


def main() -> None:
    """Kill, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="of each policy")
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    parser.add_argument("--every-steps", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    kills: list[Kill] = []
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        arguments = {
            name: [*own, "--steps", str(options.steps)]
            for name, own in policies(options.every_steps).items()
        }
        for name, own in arguments.items():
            rounds = [
                undisturbed(Path(scratch) / f"{name}-whole-{k}", own, options.steps)
                for k in range(2)  # the second one from a warm compilation cache
            ]
            seconds[name] = statistics.median(rounds)
        while len(kills) < options.kills * len(arguments):
            count = min(PER_RUN, options.kills - len(kills) // len(arguments))
            last = (options.steps - 1) * MICROBATCHES
            targets = sorted(random.uniform(MICROBATCHES, last, count))
            for name, own in arguments.items():
                folder = Path(scratch) / f"{name}-{len(kills)}"
                kills += kills_of_a_run(name, targets, folder, own, seconds[name])
    data = {"options": vars(options), "seconds": seconds, "kills": [k._asdict() for k in kills]}
    (FOLDER / "recovery.json").write_text(json.dumps(data, indent=1) + "\n")
    write(data)


if __name__ == "__main__":
    main()
