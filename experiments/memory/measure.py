"""Bytes per device of a GPT of a billion parameters: compiled for real targets, never run.

    pip install -e . libtpu
    python experiments/memory/measure.py

Prints a table and writes RESULTS.md and memory.png beside this file. State is parameters and AdamW
moments in float32; activations are bfloat16. Data parallelism gives each of the four devices a
quarter of the microbatches.
"""

import argparse
import dataclasses
import datetime
import os
import pathlib
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from flax import nnx
from gpipe_autodiff import gpipe_loss
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.adapters import pipeline_from_nnx
from jpipe.memory import Memory, format_bytes, memory_of
from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.pipeline import batch_sharding
from jpipe.precision import Policy
from jpipe.targets import TARGETS, topology
from jpipe.train_step import (
    TrainState,
    abstract_train_state,
    make_reference_step,
    make_train_step,
)

STAGES = 4
FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    method: str
    recompute: str
    num_microbatches: int


def cases(counts: list[int]) -> Iterator[Case]:
    """All methods at the first count, and recomputation at all counts."""
    methods = ["data parallel", "gpipe, autodiff", "1f1b", "1f1b-overlap"]
    for method in methods:
        yield Case(method, "none", counts[0])
    for method in methods:
        for count in counts:
            yield Case(method, "stage", count)


def compile_case(case: Case, config: GPTConfig, size: int, devices: Any) -> Memory:
    """Compile one training step and ask what it needs on a device."""
    alone = case.method == "data parallel"
    recompute: Any = case.recompute
    if alone and recompute == "stage":
        recompute = "block"  # one device has all blocks
    pipe = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs),
        stem="embedding",
        body="blocks",
        head="head",
        recompute=recompute,
    )
    optimizer = optax.adamw(1e-3)

    def init() -> Any:
        return pipe.init(nnx.Rngs(0))

    count = case.num_microbatches // STAGES if alone else case.num_microbatches
    mesh = make_mesh(1 if alone else STAGES, devices=devices)
    batch = jax.ShapeDtypeStruct(
        (count, size, config.context), np.int32, sharding=batch_sharding(mesh)
    )
    state = abstract_train_state(init, optimizer, mesh)
    if alone:
        step = make_reference_step(pipe.stages, next_token_loss, optimizer)
    elif case.method == "gpipe, autodiff":
        step, state = autodiff_step(pipe.stages, optimizer, mesh, state)
    else:
        step = make_train_step(pipe.stages, next_token_loss, optimizer, mesh, case.method)
    return memory_of(step.lower(state, batch, batch).compile())


def autodiff_step(stages: Any, optimizer: Any, mesh: Mesh, state: TrainState) -> Any:
    """GPipe by autodiff; stem and head are whole on every device, as it is usually done."""
    loss = gpipe_loss(stages, next_token_loss, mesh)

    def step(state: TrainState, inputs: jax.Array, targets: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, inputs, targets)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), value

    everywhere = NamedSharding(mesh, PartitionSpec())

    def whole(path: Any, leaf: Any) -> Any:
        body = any(getattr(key, "name", None) == "body" for key in path)
        sharding = leaf.sharding if body else everywhere
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = jax.tree_util.tree_map_with_path(whole, state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere)), state


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2816)
    parser.add_argument("--heads", type=int, default=22)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--target", default="v5p", choices=TARGETS)
    options = parser.parse_args()
    config = GPTConfig(
        vocab_size=options.vocab_size,
        context=options.context,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        policy=Policy(compute="bfloat16", output="bfloat16", norm="bfloat16", softmax="bfloat16"),
    )
    devices = topology(options.target)
    shapes = jax.eval_shape(
        lambda: nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(0)), nnx.Param))
    )
    num_params = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    found: dict[Case, Memory] = {}
    for case in cases(options.microbatches):
        started = time.perf_counter()
        found[case] = compile_case(case, config, options.microbatch_size, devices)
        seconds = time.perf_counter() - started
        print(case, format_bytes(found[case].total), f"compiled in {seconds:.0f} s", flush=True)
    report(found, options, num_params)
    draw(found, options.target)


def report(found: dict[Case, Memory], options: Any, num_params: int) -> None:
    """Write the table."""
    alone = {(c.recompute, c.num_microbatches): m for c, m in found.items() if "data" in c.method}
    versions = ", ".join(f"{n} {metadata.version(n)}" for n in ("jax", "flax", "optax", "libtpu"))
    lines = [
        "# Memory per device",
        "",
        f"{datetime.date.today()}, compiled for {options.target} and not run; {versions}. "
        f"`python experiments/memory/measure.py`",
        "",
        f"GPT of {num_params / 1e9:.2f}e9 parameters ({options.layers} layers, width "
        f"{options.width}, context {options.context}, vocabulary {options.vocab_size:,}), AdamW, "
        f"float32 state of {format_bytes(12 * num_params)}, bfloat16 activations, {STAGES} "
        f"devices, microbatches of {options.microbatch_size}.",
        "",
        "| method | recompute | M | state | temporary | together | against data parallel |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, memory in found.items():
        beside = alone[case.recompute, case.num_microbatches].total
        lines.append(
            f"| {case.method} | {case.recompute} | {case.num_microbatches} "
            f"| {format_bytes(memory.state)} | {format_bytes(memory.temporary)} "
            f"| {format_bytes(memory.total)} | {memory.total / beside - 1:+.0%} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    (FOLDER / "RESULTS.md").write_text(text)


def draw(found: dict[Case, Memory], target: str) -> None:
    """Draw bytes against M, with recomputation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for method in dict.fromkeys(case.method for case in found):
        points = [
            (c.num_microbatches, m.total / 1e9)
            for c, m in found.items()
            if c.method == method and c.recompute == "stage"
        ]
        axes.plot(*zip(*points, strict=True), "o-", label=method)
    axes.set_xlabel("microbatches")
    axes.set_ylabel("bytes per device (GB)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"all blocks computed again; {target}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(FOLDER / "memory.png")


if __name__ == "__main__":
    main()
