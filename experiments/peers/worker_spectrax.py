"""Worker: SpectraX's true MPMD pipelines (`sxcall`), and the one-device baselines by its JAX."""

import pathlib
import sys
from importlib import metadata
from typing import Any

import jax
import model_jax
import numpy as np
import one_device_jax
import spectrax
from problem import STAGES, Problem, load_problem
from protocol import serve
from runner_jax import Compiled, Eager
from spectrax.nn import PipelineSequential
from spectrax.runtime.mpmd import sxcall
from spectrax.runtime.schedules import GPipe, InterleavedH1, Schedule, Std1F1B, ZeroBubbleH1

SCHEDULES: dict[str, type[Schedule]] = {
    "gpipe": GPipe,
    "std-1f1b": Std1F1B,
    "zero-bubble-h1": ZeroBubbleH1,
    "interleaved-h1": InterleavedH1,
}


class Stage(spectrax.Module):
    """One stage as a SpectraX module: its parameters, and the functions all contenders run."""

    def __init__(self, params: Any, heads: int, stem: bool, head: bool) -> None:
        super().__init__()
        self.heads, self.stem, self.head = heads, stem, head
        # Attributes are how SpectraX finds parameters.
        for part in ["body"] + ["stem"] * stem + ["head"] * head:
            for name, array in params[part].items():
                setattr(self, f"{part}_{name}", spectrax.Parameter(jax.numpy.asarray(array)))
        self.names = {part: tuple(arrays) for part, arrays in params.items()}

    def forward(self, x: Any) -> jax.Array:
        """Run the blocks; the first stage also embeds tokens, the last makes logits."""

        def part(name: str) -> dict[str, jax.Array]:
            return {key: getattr(self, f"{name}_{key}").value for key in self.names[name]}

        if self.stem:
            x = model_jax.stem(part("stem"), x)
        x = model_jax.repeat(model_jax.make_block(self.heads))(part("body"), x)
        return model_jax.head(part("head"), x) if self.head else x


def pipeline(
    kind: str, problem: Problem, params: Any, inputs: np.ndarray, targets: np.ndarray
) -> Eager:
    """One of its schedules; one with virtual stages gets two for each device."""
    schedule = SCHEDULES[kind](microbatches=len(inputs))
    count = STAGES * schedule.virtual_stages_per_rank()
    own = problem.layers // count

    def stage(s: int) -> Stage:
        body = {name: a[s * own : (s + 1) * own] for name, a in params["body"].items()}
        return Stage(params | {"body": body}, problem.heads, s == 0, s == count - 1)

    model = PipelineSequential(*map(stage, range(count)))
    mesh = spectrax.create_mesh(axis_dims=(STAGES, 1, 1, 1, 1, 1), mpmd_axis="pp")
    batch = tuple(jax.numpy.asarray(a.reshape(-1, a.shape[-1])) for a in (inputs, targets))

    def step() -> tuple[jax.Array, Any]:
        loss, grads = sxcall(
            model, batch, mesh=mesh, schedule=schedule, loss_fn=model_jax.next_token_loss
        )
        return loss, dict(grads.shards)

    return Eager(step)


def main() -> None:
    """Serve."""
    folder = pathlib.Path(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)

    def make(contender: str, problem: str, num_microbatches: int) -> Any:
        work = load_problem(folder, problem, num_microbatches)
        kind = contender.split("/")[1]
        if kind == "scan":
            return Compiled(*one_device_jax.scan(*work))
        return Eager(one_device_jax.split(*work)) if kind == "split" else pipeline(kind, *work)

    contenders = [f"spectrax/{kind}" for kind in ("scan", "split", *SCHEDULES)]
    serve(contenders, {n: metadata.version(n) for n in ("spectrax-lib", "jax", "jaxlib")}, make)


if __name__ == "__main__":
    main()
