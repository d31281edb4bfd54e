"""A small GPT's training step, compiled for a target."""

import dataclasses
import functools
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from pipeline import hlo

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.pipeline import batch_sharding
from jpipe.precision import Policy
from jpipe.schedule import assign_slots, make_schedule
from jpipe.targets import compiler_options, topology
from jpipe.train_step import abstract_train_state, make_train_step

STAGES, SIZE, CONTEXT, WIDTH, VOCABULARY = 4, 3, 16, 48, 80
MICROBATCHES = 8
CHUNKS = {"interleaved": 2, "zero-bubble-v": 2}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
        program: its text, understood.
        temp_bytes: what a device needs beside the state.
        num_kept: how many microbatches a stage keeps at most.
        thunks: for a GPU, the kinds of what runs and of all that it is part of, outermost first.
    """

    program: hlo.Program
    temp_bytes: int
    num_kept: int
    thunks: list[tuple[str, ...]]

    @property
    def loop(self):
        """The instructions of the loop over ticks, in the order in which they are issued."""
        return self.program.computations[self.program.loop_body]

    def in_loop(self, **options):
        return list(self.program.within(self.program.loop_body, **options))

    def num_matmuls(self, instruction):
        inside = [i for c in instruction.called for i in self.program.within(c)]
        return sum(i.is_matmul for i in (instruction, *inside))

    def between(self, start, computation=None):
        """What is issued between the start of something asynchronous and its end."""
        order = self.program.computations[computation or self.program.loop_body]
        first = order.index(start)
        (last,) = (
            k
            for k, i in enumerate(order)
            if i.opcode == f"{start.opcode.removesuffix('-start')}-done"
            and start.name in i.operands
        )
        return order[first + 1 : last]

    @functools.cached_property
    def carried(self):
        """Shapes of the float arrays that a tick passes on: stash, sums, and what is exchanged."""
        body = self.program.root(self.program.loop_body)
        changed = {name for name in body.operands if not self._passed_on(name)}
        arrays = [a for i in self.loop if i.name in changed for a in i.arrays]
        return {shape for dtype, shape in arrays if not dtype.startswith(("s", "u"))}

    def _passed_on(self, name):
        """Whether the loop leaves it as it is."""
        (made,) = (i for i in self.loop if i.name == name)
        if made.opcode != "get-tuple-element":
            return False
        (source,) = (i for i in self.loop if i.name == made.operands[0])
        return source.opcode == "parameter"


@functools.cache
def compiled(
    target,
    schedule,
    *,
    num_microbatches=MICROBATCHES,
    dtype="bfloat16",
    num_data=1,
    without=(),
):
    """A step of a GPT of two blocks a stage, over all four devices of a target.

    Args:
        target: its name.
        schedule: the name of a schedule.
        num_microbatches: M.
        dtype: of activations.
        num_data: devices along `data`; the others lie along `stage`.
        without: recommended options to leave out.
    """
    stages = STAGES // num_data
    policy = Policy(compute=dtype, output=dtype, norm=dtype, softmax=dtype)
    config = GPTConfig(VOCABULARY, CONTEXT, layers=2 * stages, width=WIDTH, heads=2, policy=policy)
    model = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs),
        stem="embedding",
        body="blocks",
        head="head",
        num_chunks=CHUNKS.get(schedule, 1),
    )
    devices = topology(target)
    mesh = make_mesh(stages, num_data, devices=devices)
    optimizer = optax.adam(1e-3)
    state = abstract_train_state(lambda: model.init(nnx.Rngs(0)), optimizer, mesh)
    tokens = jax.ShapeDtypeStruct(
        (num_microbatches, SIZE * num_data, CONTEXT), jnp.int32, sharding=batch_sharding(mesh)
    )
    step = make_train_step(model.stages, next_token_loss, optimizer, mesh, schedule)
    platform = devices[0].platform
    options = compiler_options(platform)
    options = {name: value for name, value in options.items() if name not in without}
    with tempfile.TemporaryDirectory() as folder:
        if platform == "gpu":
            options["xla_dump_to"] = folder
        program = step.lower(state, tokens, tokens).compile(compiler_options=options)
        thunks = _thunks(Path(folder)) if platform == "gpu" else []
    text = program.as_text()
    assert "is_scheduled=true" in text.partition("\n")[0]
    table = make_schedule(schedule, stages, num_microbatches, CHUNKS.get(schedule, 1))
    num_kept = int(assign_slots(table).per_stage.max())
    return Compiled(hlo.parse(text), program.memory_analysis().temp_size_in_bytes, num_kept, thunks)


def _thunks(folder):
    (path,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
    found, around = [], []
    for line in path.read_text().splitlines():
        # A line may begin with the name of the branch that it is in.
        if not (match := re.match(r"( *)\d+: (k\w+)", line)):
            continue
        depth = len(match[1])
        around = [(d, kind) for d, kind in around if d < depth] + [(depth, match[2])]
        found.append(tuple(kind for _, kind in around))
    return found
