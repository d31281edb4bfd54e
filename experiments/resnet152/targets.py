"""The ResNet, its training step and its gradient reductions, compiled for eight H100."""

import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from hlo import Compiled
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.adapters import FlaxPipeline, pipeline_from_nnx
from jpipe.adapters.split import flops
from jpipe.memory import Memory, memory_of
from jpipe.mesh import DATA, make_mesh
from jpipe.models import ResNet, ResNetConfig, classification_loss
from jpipe.optim import compressed_all_reduce
from jpipe.pipeline import batch_sharding, param_specs
from jpipe.schedule import make_schedule
from jpipe.targets import compiler_options
from jpipe.train_step import abstract_train_state, make_train_step

STAGES, REPLICAS = 4, 2
CACHE = pathlib.Path(tempfile.gettempdir(), "jpipe-resnet152")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        config: of the ResNet.
        image_size: pixels along an edge.
        microbatch_size: images of a replica's microbatch.
        num_microbatches: M.
    """

    config: ResNetConfig
    image_size: int
    microbatch_size: int
    num_microbatches: int

    @functools.cached_property
    def pipe(self) -> FlaxPipeline:
        """The model, its stages balanced by flops."""
        return pipeline_from_nnx(
            lambda rngs: ResNet(self.config, rngs=rngs),
            stem="stem",
            body="blocks",
            head="head",
            num_stages=STAGES,
            inputs=self.images(self.microbatch_size),
        )

    @property
    def params(self) -> Any:
        """Shapes of the parameters."""
        return jax.eval_shape(lambda: self.pipe.init(nnx.Rngs(0)))[0]

    def images(self, *counts: int) -> jax.ShapeDtypeStruct:
        """Shape of images."""
        shape = (*counts, self.image_size, self.image_size, self.config.channels)
        return jax.ShapeDtypeStruct(shape, np.float32)


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer of the pipeline: flops of a microbatch, as XLA counts them before it compiles.

    Attributes:
        forward: of the forward.
        backward: of the gradients of parameters and input.
        num_params: parameters.
        saved_bytes: what `jax.vjp` saves for the backward beside the parameters.
    """

    forward: float
    backward: float
    num_params: int
    saved_bytes: int


def blocks_by_stage(problem: Problem) -> list[list[Block]]:
    """The layers of each stage in the order of the forward, stem and head among them."""
    model = nnx.eval_shape(lambda: ResNet(problem.config, rngs=nnx.Rngs(0)))
    x: Any = problem.images(problem.microbatch_size)
    found, known = [], dict[Any, tuple[Block, Any]]()
    for layer in (model.stem, *model.blocks, model.head):
        graph, *variables = nnx.split(layer, nnx.Param, ...)
        params, state = map(nnx.to_pure_dict, variables)
        key = (graph, str(x))
        if key not in known:
            known[key] = _block(graph, params, state, x, is_first=layer is model.stem)
        block, x = known[key]
        found.append(block)
    cuts = [0, *(1 + point for point in problem.pipe.split_points or ()), len(found)]
    return [found[a:b] for a, b in itertools.pairwise(cuts)]


def _block(graph: Any, params: Any, state: Any, x: Any, *, is_first: bool) -> tuple[Block, Any]:
    def forward(params: Any, x: Any, state: Any) -> Any:
        return nnx.merge(graph, nnx.State(params), nnx.State(state))(x)

    def pullback(params: Any, x: Any, state: Any) -> Any:
        if is_first:  # nobody wants the gradient of the images
            return jax.vjp(lambda p: forward(p, x, state), params)
        return jax.vjp(lambda p, x: forward(p, x, state), params, x)

    def both(params: Any, x: Any, state: Any) -> Any:
        y, pull = pullback(params, x, state)
        return pull(y)

    y, saved = jax.eval_shape(pullback, params, x, state)
    sizes = [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(t)) for t in (saved, params)
    ]
    one_way = flops(forward, params, x, state)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    whole = flops(both, params, x, state)
    return Block(one_way, whole - one_way, num_params, max(sizes[0] - sizes[1], 0)), y


def h100_mesh() -> Mesh:
    """Stages x data over two hosts of four H100: a host has all stages of a replica."""
    description = resources.files("jpipe").joinpath("gpus", "h100.txtpb").read_text()
    found = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x{REPLICAS}x{STAGES}"
    )
    hosts = np.array(found.devices).reshape(REPLICAS, STAGES)
    return make_mesh(STAGES, REPLICAS, devices=list(hosts.T.ravel()))


def compile_step(
    problem: Problem, mesh: Mesh, schedule: str, method: str | None
) -> tuple[Compiled, Memory]:
    """A training step with SGD.

    Args:
        problem: what is trained.
        mesh: stages x data.
        schedule: name of the schedule.
        method: of `compressed_all_reduce`; None without one, where XLA sums gradients itself.
    """
    pipe, optimizer = problem.pipe, optax.sgd(0.1)
    if method is not None:
        reduce = compressed_all_reduce(method, mesh, param_specs(mesh, problem.params))
        optimizer = optax.chain(reduce, optimizer)
    state = abstract_train_state(lambda: pipe.init(nnx.Rngs(0)), optimizer, mesh)
    sharding, count = batch_sharding(mesh), problem.num_microbatches
    size = problem.microbatch_size * REPLICAS
    images = problem.images(count, size).update(sharding=sharding)
    labels = jax.ShapeDtypeStruct((count, size), np.int32, sharding=sharding)
    step = make_train_step(pipe.stages, classification_loss, optimizer, mesh, schedule)
    name = f"step, {schedule}, {method or 'sums by XLA'}"
    return _compile(name, step.lower(state, images, labels))


def compile_reduction(problem: Problem, mesh: Mesh, method: str) -> tuple[Compiled, Memory]:
    """The reduction of the gradients alone, as it stands in a step after the loop over ticks."""
    params, specs = problem.params, param_specs(mesh, problem.params)
    reduce = compressed_all_reduce(method, mesh, specs)
    state = abstract_train_state(lambda: problem.pipe.init(nnx.Rngs(0)), reduce, mesh).opt_state

    def of_replicas(param: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(DATA, *spec))
        return jax.ShapeDtypeStruct((REPLICAS, *param.shape), np.float32, sharding=sharding)

    grads = jax.tree.map(of_replicas, params, specs)
    lowered = jax.jit(reduce.update, donate_argnums=(0, 1)).lower(grads, state)
    return _compile(f"reduction, {method}", lowered)


def _compile(name: str, lowered: jax.stages.Lowered) -> tuple[Compiled, Memory]:
    """Compile, or take what an earlier run made of the same program."""
    options = compiler_options("gpu")
    recipe = json.dumps([jax.__version__, options]) + lowered.as_text()
    path = CACHE / f"{hashlib.sha256(recipe.encode()).hexdigest()}.json.gz"
    started = time.perf_counter()
    if path.exists():
        found = json.loads(gzip.decompress(path.read_bytes()))
    else:
        compiled = lowered.compile(compiler_options=options)
        found = {"memory": memory_of(compiled), "text": compiled.as_text()}
        CACHE.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(found).encode(), compresslevel=1))
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    return Compiled(found["text"], STAGES, REPLICAS), Memory(*found["memory"])


@dataclasses.dataclass(frozen=True)
class Programs:
    """What was compiled.

    Attributes:
        by_xla: a step in which XLA sums gradients over `data`, and its memory.
        once: a step that sums them once, and its memory.
        gpipe: memory of the same step with the stash of all microbatches.
        gpipe_slots: how many these are.
        reductions: by method.
    """

    by_xla: tuple[Compiled, Memory]
    once: tuple[Compiled, Memory]
    gpipe: Memory
    gpipe_slots: int
    reductions: dict[str, Compiled]


def compile_all(problem: Problem, methods: Sequence[str]) -> Programs:
    """Compile for H100."""
    mesh = h100_mesh()
    return Programs(
        by_xla=compile_step(problem, mesh, "1f1b", None),
        once=compile_step(problem, mesh, "1f1b", "none"),
        gpipe=compile_step(problem, mesh, "gpipe", "none")[1],
        gpipe_slots=problem.num_microbatches,
        reductions={m: compile_reduction(problem, mesh, m)[0] for m in methods},
    )


def period() -> int:
    """Ticks in the body of the loop."""
    return make_schedule("1f1b", STAGES, STAGES).period or 1
