"""What XLA makes of a pipelined GPT: which exchanges, branches, copies and buffers there are."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from parity import models
from pipeline import hlo
from pipeline.simple_split import split_gradient

from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.pipeline import Chunks, Params, Stages, pipeline_value_and_grad, repeat_block, residuals
from jpipe.pipeline.weight_gradient import split_backward
from jpipe.schedule import SCHEDULES, assign_slots, make_schedule
from jpipe.schedule.registry import CHUNKED
from jpipe.schedule.slots import assign_weight_slots
from jpipe.schedule.table import lanes

STAGES, SIZE, CONTEXT, WIDTH = 4, 3, 10, 24
CONFIG = GPTConfig(vocab_size=19, context=CONTEXT, layers=2 * STAGES, width=WIDTH, heads=2)
FLAT = [name for name in SCHEDULES if name != "gpipe"]
CHUNKS = {name: 2 if name in CHUNKED else 1 for name in SCHEDULES}
PICKED = ("gpipe", "zero-bubble")  # their exchanges are picked at run time
SPLIT = ("zero-bubble", "zero-bubble-overlap", "zero-bubble-v")
UP = {(s, s + 1) for s in range(STAGES - 1)}
DOWN = {(t, s) for s, t in UP}
# The routes of one period, for each schedule in no order.
ROUTES = {
    "gpipe": [UP, DOWN],
    "1f1b": [{(0, 1), (1, 0), (2, 3), (3, 2)}, {(1, 2), (2, 1)}],
    "1f1b-overlap": [UP, DOWN],
    "interleaved": [UP | {(STAGES - 1, 0)}, DOWN | {(0, STAGES - 1)}],
    "zero-bubble-overlap": [UP, DOWN],
    "zero-bubble-v": [UP, DOWN],
}
# Each schedule keeping all; computing again in some.
RECOMPUTE = [
    *itertools.product(SCHEDULES, ["none"]),
    *itertools.product(["1f1b", "interleaved", "zero-bubble"], ["stage"]),
    ("1f1b", "block"),
]
PASSES_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "conditional"}
ACTIVATION = SIZE * CONTEXT * WIDTH * 4  # bytes


@dataclasses.dataclass(frozen=True)
class Compiled:
    schedule: str
    recompute: str
    program: hlo.Program
    temp_bytes: int
    kept_bytes: int
    left_bytes: int
    stash_shapes: set
    sum_shapes: set

    def in_loop(self, **options):
        return list(self.program.within(self.program.loop_body, **options))


def gpt(recompute, num_chunks):
    model = GPT(CONFIG, rngs=nnx.Rngs(0))
    stem_graph, stem = nnx.split(model.embedding)
    head_graph, head = nnx.split(model.head)
    blocks = [nnx.split(block) for block in model.blocks]
    stages = Stages(
        stem=lambda p, tokens: nnx.merge(stem_graph, p)(tokens),
        body=repeat_block(lambda p, x: nnx.merge(blocks[0][0], p)(x), recompute),
        head=lambda p, x: nnx.merge(head_graph, p)(x),
    )
    states = [state for _, state in blocks]
    count = len(states) // num_chunks
    body = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *states[c * count :][:count])
        for c in range(num_chunks)
    ]
    if num_chunks == 1:
        return stages, Params(stem, body[0], head)
    stages = dataclasses.replace(stages, body=Chunks(*[stages.body] * num_chunks))
    return stages, Params(stem, Chunks(*body), head)


@functools.cache
def split(recompute, num_chunks):
    """What one microbatch leaves in the stash, and what a backward leaves of it if it is cut."""
    stages, params = gpt(recompute, num_chunks)
    body, own = stages.body, of_one_stage(params.body)
    if num_chunks > 1:
        body, own = body[0], own[0]
    x = jax.ShapeDtypeStruct((SIZE, CONTEXT, WIDTH), jnp.float32)
    whole = residuals.split_gradient(lambda p, _, x, __: (body(p, x), ()), own, (), x, ())
    return whole.kept, split_backward(whole, own, (), x).left


def num_bytes(arrays):
    return sum(a.size * a.dtype.itemsize for a in arrays)


def kept_bytes(recompute, num_chunks=1):
    return num_bytes(split(recompute, num_chunks)[0])


def of_one_stage(body):
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] // STAGES, *a.shape[1:]), a.dtype), body
    )


@functools.cache
def compiled(schedule, num_microbatches, recompute="none", verify=False):
    num_chunks = CHUNKS[schedule]
    stages, params = gpt(recompute, num_chunks)
    table = make_schedule(schedule, STAGES, num_microbatches, num_chunks)
    slots, weight_slots = (
        int(assign(table).per_stage.max()) for assign in (assign_slots, assign_weight_slots)
    )
    tokens = jax.ShapeDtypeStruct((num_microbatches, SIZE, CONTEXT), jnp.int32)
    run = pipeline_value_and_grad(
        stages, next_token_loss, make_mesh(STAGES), schedule, verify=verify
    )
    program = run.lower(params, tokens, tokens).compile()
    kept, left = split(recompute, num_chunks)
    return Compiled(
        schedule,
        recompute,
        hlo.parse(program.as_text()),
        program.memory_analysis().temp_size_in_bytes,
        slots * num_bytes(kept),
        weight_slots * num_bytes(left),
        {(slots, *k.shape) for k in kept}
        | {(weight_slots, *k.shape) for k in left if weight_slots},
        {leaf.shape for leaf in jax.tree.leaves(of_one_stage(params.body))},
    )


# Of the scope of the module, so that tests of the same program run one after the other.
@pytest.fixture(scope="module", params=RECOMPUTE, ids="-".join)
def found(request):
    schedule, recompute = request.param
    return compiled(schedule, 8, recompute)


def test_the_loop_exchanges_between_neighbours_only(found):
    exchanges = [i for i in found.in_loop() if i.is_collective]
    assert {i.opcode for i in exchanges} == {"collective-permute"}
    wraps = {1, STAGES - 1} if found.schedule == "interleaved" else {1}
    assert all(abs(s - t) in wraps for i in exchanges for s, t in i.pairs)
    pairs = {tuple(sorted(i.pairs)) for i in exchanges}
    if found.schedule == "zero-bubble":
        table = make_schedule(found.schedule, STAGES, 8)
        routes = {lane for route in table.routes for lane in lanes(STAGES, route) if lane}
        assert pairs == {tuple(sorted(lane)) for lane in routes}
        return
    assert len(pairs) == len(exchanges)
    assert pairs == {tuple(sorted(route)) for route in ROUTES[found.schedule]}


def test_an_exchange_carries_one_activation(found):
    assert {i.num_bytes for i in found.in_loop() if i.is_collective} == {ACTIVATION}


def test_no_exchange_waits_in_a_branch_that_depends_on_the_stage(found):
    outside = [i for i in found.in_loop(enter_branches=False) if i.is_collective]
    if found.schedule not in PICKED:
        assert len(outside) == 2
        return
    # The route is picked at run time, the same for all: a conditional that only exchanges.
    assert not outside
    for conditional in (i for i in found.in_loop() if i.opcode == "conditional"):
        branches = [list(found.program.within(b)) for b in conditional.called]
        if any(i.is_collective for branch in branches for i in branch):
            for branch in branches:
                assert {i.opcode for i in branch} <= PASSES_ON | {"collective-permute", "copy"}
                assert {i.num_bytes for i in branch if i.opcode == "copy"} <= {ACTIVATION}
                assert sum(i.is_collective for i in branch) <= 2


def test_operations_stay_conditional(found):
    # Per tick with a forward: stem, the body of each chunk, keeping its output. With a backward:
    # head, the body of each chunk, stem. In 1F1B each of the period's two ticks has both; GPipe
    # and one of the zero bubbles pick a route besides, and all of these have weight gradients, of
    # each chunk.
    count = {
        "gpipe": 7,
        "1f1b": 12,
        "1f1b-overlap": 6,
        "interleaved": 8,
        "zero-bubble": 8,
        "zero-bubble-overlap": 7,
        "zero-bubble-v": 10,
    }
    found_count = sum(i.opcode == "conditional" for i in found.in_loop())
    assert found_count == count[found.schedule]


def test_nothing_is_computed_in_a_bubble(found):
    assert not [i for i in found.in_loop(enter_branches=False) if i.is_matmul]
    # A block multiplies six times forward, each for two gradients backward, in whichever half of
    # it; the head once.
    per_period = 2 if found.schedule == "1f1b" else 1
    again = {"none": 0, "block": 2 * 5, "stage": (6 + 5 if CHUNKS[found.schedule] == 1 else 2 * 5)}
    per_tick = 2 * 18 + 3 + again[found.recompute]
    assert sum(i.is_matmul for i in found.in_loop()) == per_period * per_tick


def test_stash_and_sums_are_never_copied(found):
    large = found.stash_shapes | found.sum_shapes
    copies = [
        i
        for i in found.in_loop()
        if i.opcode.startswith("copy") and large.intersection(shape for _, shape in i.arrays)
    ]
    assert not copies


def test_the_stash_changes_in_place_only(found):
    writers = []
    for instruction in found.in_loop():
        shapes = {shape for _, shape in instruction.arrays}
        if instruction.opcode in PASSES_ON or not shapes & found.stash_shapes:
            continue
        if instruction.opcode == "fusion":
            instruction = found.program.root(instruction.called[0])
        writers.append(instruction.opcode)
    assert writers
    assert set(writers) == {"dynamic-update-slice"}


def test_the_stash_holds_what_the_schedule_keeps_and_no_more(found):
    """Of what the loop carries, the buffers of the stash are those of the table, once each."""
    table = make_schedule(found.schedule, STAGES, 8, CHUNKS[found.schedule])
    per_stage = assign_slots(table).per_stage
    weight_slots = int(assign_weight_slots(table).per_stage.max())
    kept, left = split(found.recompute, CHUNKS[found.schedule])
    names = {"float32": "f32", "int32": "s32", "bool": "pred"}
    buffers = [(names[str(k.dtype)], (int(per_stage.max()), *k.shape)) for k in kept]
    buffers += [(names[str(k.dtype)], (weight_slots, *k.shape)) for k in left if weight_slots]
    # What the head has yet to read, and the batch, too.
    expected = collections.Counter(buffers)
    expected["f32", (int(per_stage[table.stage_of(table.last)]), SIZE, CONTEXT, WIDTH)] += 1
    expected["s32", (8, SIZE, CONTEXT)] += 2
    carried = collections.Counter(found.program.loop.arrays)
    assert {key: carried[key] for key in buffers} == {key: expected[key] for key in buffers}


def test_recompute_keeps_the_inputs_of_blocks_or_of_the_stage(found):
    num_chunks = CHUNKS[found.schedule]
    whole = kept_bytes("none", num_chunks)
    assert whole > 10 * ACTIVATION / num_chunks
    assert found.temp_bytes > found.kept_bytes + found.left_bytes
    if found.recompute != "none":
        own = kept_bytes(found.recompute, num_chunks)
        assert own == {"block": 2, "stage": 1}[found.recompute] * ACTIVATION
        assert found.temp_bytes - found.left_bytes < found.kept_bytes * whole / own


def test_sizes_tell_stash_and_sums_apart(found):
    payloads = {(SIZE, CONTEXT, WIDTH), (1, SIZE, CONTEXT, WIDTH)}
    assert found.stash_shapes.isdisjoint(found.sum_shapes | payloads)
    assert found.sum_shapes.isdisjoint(payloads)


@pytest.mark.parametrize("schedule", FLAT)
def test_only_gpipe_grows_with_the_number_of_microbatches(schedule):
    few = compiled(schedule, 8)
    for num_microbatches in (32, 64):
        many = compiled(schedule, num_microbatches)
        # But for the table itself.
        added = make_schedule(schedule, STAGES, num_microbatches, CHUNKS[schedule]).num_ticks * 64
        assert few.temp_bytes * 0.99 < many.temp_bytes < few.temp_bytes * 1.005 + added
        assert many.program.num_instructions == few.program.num_instructions


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-overlap"])
def test_a_verified_exchange_carries_a_checksum_and_an_address(schedule):
    plain, few, many = compiled(schedule, 8), *(compiled(schedule, m, verify=True) for m in (8, 32))
    exchanges = [i for i in few.in_loop(enter_branches=False) if i.is_collective]
    assert {i.opcode for i in exchanges} == {"collective-permute"}
    assert sum(i.num_bytes for i in exchanges) == 2 * (ACTIVATION + 4 + 3 * 4)
    assert len([i for i in few.in_loop() if i.is_collective]) == len(exchanges)
    assert few.temp_bytes * 0.99 < many.temp_bytes < few.temp_bytes * 1.005 + 8192
    assert many.program.num_instructions == few.program.num_instructions
    # The sums and the stash stay where they are.
    assert few.temp_bytes < plain.temp_bytes * 1.2


def test_memory_of_gpipe_grows_with_every_microbatch():
    few, many = compiled("gpipe", 8), compiled("gpipe", 64)
    assert many.program.num_instructions == few.program.num_instructions
    growth = (many.temp_bytes - few.temp_bytes) / (64 - 8)
    # Besides the stash, the last stage keeps its outputs for the head.
    assert kept_bytes("none") <= growth <= 1.1 * (kept_bytes("none") + ACTIVATION)


def test_each_row_of_data_devices_has_a_chain_of_its_own():
    problem = models.mlp(4, 4, size=4)
    mesh = make_mesh(4, 2)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, "1f1b-overlap")
    lowered = run.lower(problem.params, problem.inputs, problem.targets)
    program = hlo.parse(lowered.compile().as_text())
    exchanges = [i for i in program.within(program.loop_body) if i.is_collective]
    device = [d.id for d in mesh.devices.flat]
    pairs = [sorted((device[s], device[t]) for s, t in i.pairs) for i in exchanges]
    # Devices 0 to 3 and 4 to 7; gradients meet across them after the loop, not in it.
    up = sorted(UP | {(s + 4, t + 4) for s, t in UP})
    assert {i.opcode for i in exchanges} == {"collective-permute"}
    assert sorted(pairs) == sorted([up, sorted((t, s) for s, t in up)])


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-overlap"])
def test_stages_that_differ(schedule):
    # Their parameters, activations and stash lie in vectors as long as the largest stage needs.
    problem = models.uneven((24, 40, 32, 16, 8), 8, size=6)
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(STAGES), schedule)
    lowered = run.lower(problem.params, problem.inputs, problem.targets)
    program = hlo.parse(lowered.compile().as_text())
    body, x = problem.stages.body, jax.ShapeDtypeStruct((6, 24), jnp.float32)
    stashed, sums, outputs = [], [], [x]
    for function, params in zip(body, problem.params.body, strict=True):
        stashed.append(sum(k.size for k in split_gradient(function, params, outputs[-1]).kept))
        sums.append(sum(leaf.size for leaf in jax.tree.leaves(params)))
        outputs.append(jax.eval_shape(function, params, outputs[-1]))
    slots = int(assign_slots(make_schedule(schedule, STAGES, 8)).per_stage.max())
    stash, total, sent = (slots, max(stashed)), (max(sums),), max(y.size for y in outputs)

    loop = list(program.within(program.loop_body))
    shapes = {shape for i in loop for _, shape in i.arrays}
    assert {stash, total, (sent,)} <= shapes
    exchanges = [i for i in loop if i.is_collective]
    assert sorted(sorted(i.pairs) for i in exchanges) == sorted(map(sorted, ROUTES[schedule]))
    assert {i.num_bytes for i in exchanges} == {4 * sent}
    outside = program.within(program.loop_body, enter_branches=False)
    assert not [i for i in outside if i.is_matmul]
    copied = [shape for i in loop if i.opcode.startswith("copy") for _, shape in i.arrays]
    assert not {stash, total}.intersection(copied)
