"""What a wrong loss scale does to mixed precision with gradient accumulation.

    python experiments/precision/measure.py

One GPT on four simulated stages, 8 microbatches a step, AdamW, always the same data and seed:
float32, bfloat16, and float16 with a dynamic loss scale, with none and with constant ones. Writes
RESULTS.md and precision.png beside this file.

Half of the runs multiply the loss by a small weight, and what AdamW and the clipping compare
gradients with, too: in float32 that changes nothing. The gradients of activations are then as
small as those of a mean over so many times more tokens.
"""

import argparse
import time
import warnings

import optax
from cases import CASES, STAGES
from flax import nnx
from report import FOLDER, draw, power, report
from training import batches_of, gradients_by_scale, model_of, train

from jpipe.data import load_tokens
from jpipe.mesh import make_mesh, simulate_devices
from jpipe.train_step import init_train_state


def main() -> None:
    """Train, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    options = parser.parse_args()
    # Each case has a loss and a model of its own, from the same lines.
    warnings.filterwarnings("ignore", message="the same program was compiled")
    simulate_devices(STAGES)
    mesh, tokens = make_mesh(STAGES), load_tokens()
    curves = {}
    for case in CASES:
        since = time.perf_counter()
        curves[case] = train(case, mesh, tokens, options)
        took = time.perf_counter() - since
        print(
            f"weight {power(case.weight)}, {case.name}: {len(curves[case].losses)} steps, "
            f"validation {curves[case].validation:.4f}, {took:.0f} s",
            flush=True,
        )
    (batch,) = batches_of(tokens, 0, 1)
    scales = [2.0**k for k in (-12, -8, -4, 0, 4, 8, 12, 14, 16, 18, 20, 24)]
    fresh = init_train_state(
        lambda: model_of("fp32").init(nnx.Rngs(0)), optax.identity(), mesh
    ).params
    tables = {
        "step 1": gradients_by_scale(fresh, batch, mesh, scales),
        "the end of fp32": gradients_by_scale(curves[CASES[0]].params, batch, mesh, scales),
    }
    text = report(curves, tables, options, time.process_time())
    print(text)
    (FOLDER / "RESULTS.md").write_text(text)
    draw(curves)


if __name__ == "__main__":
    main()
