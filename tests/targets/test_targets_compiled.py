"""What XLA makes of a pipelined GPT for real accelerators: compiled, never run."""

import pytest
from targets.compiled import CONTEXT, SIZE, STAGES, WIDTH, compiled

pytestmark = pytest.mark.targets
TARGETS = ("h100", "v5e")
SCHEDULES = ("1f1b", "1f1b-overlap")
CASES = [
    *((target, schedule, "bfloat16") for target in TARGETS for schedule in SCHEDULES),
    *((target, "1f1b-overlap", "float32") for target in TARGETS),
]
PAYLOAD = (SIZE, CONTEXT, WIDTH)


# Of the scope of the module, so that tests of the same program run one after the other.
@pytest.fixture(scope="module", params=CASES, ids="-".join)
def found(request):
    target, schedule, dtype = request.param
    return compiled(target, schedule, dtype=dtype)


@pytest.fixture(scope="module", params=TARGETS)
def overlap(request):
    return compiled(request.param, "1f1b-overlap")


def test_nothing_is_computed_in_a_bubble(found):
    assert not [i for i in found.in_loop(enter_branches=False) if i.is_matmul]
    # In a tick of each kind: a stage's two blocks multiply six times forward, and each of these
    # twice backward; the head three times.
    periods = 2 if found.num_kept == STAGES else 1
    assert sum(i.is_matmul for i in found.in_loop()) == periods * (2 * 18 + 3)


def test_operations_stay_conditional(found):
    periods = 2 if found.num_kept == STAGES else 1
    assert sum(i.opcode == "conditional" for i in found.in_loop()) == periods * 6


def test_stash_and_sums_are_never_copied(found):
    kept = {shape for shape in found.carried if shape[:1] == (found.num_kept,)}
    sums = {shape for shape in found.carried if shape[:1] == (2,)}
    assert len(kept) > 5
    assert (2, WIDTH, 4 * WIDTH) in sums
    large = found.carried - {PAYLOAD, (1, *PAYLOAD), ()}
    # Not copy-start: so a TPU fetches into fast memory what it is about to read.
    copies = [
        i
        for i in found.in_loop()
        if i.opcode == "copy" and large.intersection(shape for _, shape in i.arrays)
    ]
    assert not copies


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_fills_the_stash_of_a_gpu(schedule):
    """Every slot is written before it is used; only sums of gradients have to begin with zeros."""
    found = compiled("h100", schedule)
    entry = found.program.computations[found.program.entry]
    (start,) = (i for i in entry if i.name == found.program.loop.operands[0])
    made = {i.name: i for i in entry}
    kept = [
        made[name]
        for name in start.operands
        if {shape[:1] for _, shape in made[name].arrays} == {(found.num_kept,)}
    ]
    assert len(kept) > 5
    assert all("AllocateBuffer" in i.text for i in kept)


@pytest.mark.parametrize(
    "schedule", ["interleaved", "zero-bubble", "zero-bubble-overlap", "zero-bubble-v"]
)
@pytest.mark.parametrize("target", TARGETS)
def test_other_schedules_copy_no_stash_either_and_exchange_asynchronously(target, schedule):
    other = compiled(target, schedule)
    kept = {shape for shape in other.carried if shape[:1] == (other.num_kept,)}
    assert len(kept) > 5
    copies = [
        i
        for i in other.in_loop()
        if i.opcode == "copy" and kept.intersection(shape for _, shape in i.arrays)
    ]
    # v5e lays the norms' statistics out anew for weight gradients: less than one activation.
    assert sum(i.num_bytes for i in copies) < 2 * SIZE * CONTEXT * WIDTH
    assert not copies or (target == "v5e" and schedule != "interleaved")
    assert not [i for i in other.in_loop(enter_branches=False) if i.is_matmul]
    starts = [i for i in other.loop if i.opcode == "collective-permute-start"]
    assert len(starts) == (0 if schedule == "zero-bubble" else 2)  # it picks them at run time


def test_both_exchanges_run_beside_an_operation(overlap):
    starts = [i for i in overlap.loop if i.opcode == "collective-permute-start"]
    up = {(s, s + 1) for s in range(STAGES - 1)}
    down = {(t, s) for s, t in up}
    assert sorted(sorted(i.pairs) for i in starts) == sorted(map(sorted, (up, down)))
    matmuls = {
        frozenset(start.pairs): max(
            (overlap.num_matmuls(i) for i in overlap.between(start) if i.opcode == "conditional"),
            default=0,
        )
        for start in starts
    }
    # Gradients travel under a stage's forward, activations under its backward.
    assert matmuls == {frozenset(down): 12, frozenset(up): 24}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("target", TARGETS)
def test_neither_memory_nor_program_grows_with_the_number_of_microbatches(target, schedule):
    few, many = compiled(target, schedule), compiled(target, schedule, num_microbatches=32)
    assert many.temp_bytes == pytest.approx(few.temp_bytes, rel=0.02)
    assert many.program.num_instructions == pytest.approx(few.program.num_instructions, rel=0.01)


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_are_summed_over_data_in_one_all_reduce_after_the_last_backward(target):
    found = compiled(target, "1f1b", num_data=2)
    entry = found.program.computations[found.program.entry]
    assert not [i for i in found.in_loop() if "all-reduce" in i.opcode]
    (loop,) = (k for k, i in enumerate(entry) if i.opcode == "while")
    assert not [i for i in entry[:loop] if i.opcode.startswith("all-reduce") and i.num_bytes > 1024]
    over_data = [
        i
        for i in entry[loop:]
        if i.opcode.removesuffix("-start") == "all-reduce" and "{{0,1},{2,3}}" in i.text
    ]
    (reduction,) = over_data
    # All gradients of a stage in float32; two of its blocks alone have more than this.
    assert reduction.num_bytes > 4 * 2 * 12 * WIDTH**2
    if reduction.opcode == "all-reduce":  # TPU: it blocks
        return
    between = found.between(reduction, found.program.entry)
    assert not [i for i in between if found.num_matmuls(i)]
    assert sum(i.num_bytes for i in between) < 1024


def test_v5p_keeps_operations_conditional_and_exchanges_asynchronous():
    # At toy sizes its scheduler sees nothing to gain from hiding both, see docs/xla.md.
    found = compiled("v5p", "1f1b-overlap")
    assert sum(i.opcode == "collective-permute-start" for i in found.loop) == 2
    assert not [i for i in found.in_loop(enter_branches=False) if i.is_matmul]
