"""Builders, registry and slots: the published tick counts, formulas and memory bounds."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jpipe.schedule
from jpipe.schedule import (
    SCHEDULES,
    Op,
    assign_slots,
    check_schedule,
    forward_only_schedule,
    make_schedule,
)
from jpipe.schedule.table import chain, from_ticks, lanes

NUM_TICKS = {
    "gpipe": lambda P, M: 2 * (M + P - 1),
    "1f1b": lambda P, M: 2 * (M + P - 1),
    "1f1b-overlap": lambda P, M: 2 * (M + 2 * P - 2),
    "interleaved": lambda P, M: 2 * (M + 2 * P - 2),
    "zero-bubble": lambda P, M: 3 * M + P - 1 if M >= P else None,
    "zero-bubble-overlap": lambda P, M: 3 * (M + 2 * P - 2),
    "zero-bubble-v": lambda P, M: 3 * M + P - 1 if M >= P else None,
}
MOST_KEPT = {
    "gpipe": lambda P, M, s: M,
    "1f1b": lambda P, M, s: min(M, P - s),
    "1f1b-overlap": lambda P, M, s: min(M, 2 * (P - s) - 1),
    "interleaved": lambda P, M, s: min(M, 2 * (P - s) - 1),
    "zero-bubble": lambda P, M, s: P,  # the last stages may reach it less far
    "zero-bubble-overlap": lambda P, M, s: min(M, 2 * P - 1 - s),
    "zero-bubble-v": lambda P, M, s: P,
}
names = st.sampled_from(sorted(SCHEDULES))
sizes = {"P": st.integers(1, 16), "M": st.integers(1, 64)}


def test_every_schedule_has_published_bounds():
    assert set(SCHEDULES) == set(NUM_TICKS) == set(MOST_KEPT)


@settings(deadline=None, max_examples=60)
@given(name=names, **sizes)
def test_builders_keep_their_published_bounds(name, P, M):
    schedule = make_schedule(name, P, M)
    bounds = [MOST_KEPT[name](P, M, s) for s in range(P)]
    check_schedule(schedule, bounds)
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == (name, P, M)
    assert schedule.num_ticks == NUM_TICKS[name](P, M) or NUM_TICKS[name](P, M) is None
    # The bounds are reached, so a table that keeps fewer would be news.
    kept = assign_slots(schedule).per_stage
    most = {"zero-bubble", "zero-bubble-v"}  # of all stages together
    assert kept.max() == min(P, M) if name in most else kept.tolist() == bounds


@settings(deadline=None, max_examples=40)
@given(V=st.integers(1, 4), **sizes)
def test_interleaving_keeps_its_published_bound(V, P, M):
    """Narayanan et al., 2021, whose M is a multiple of P."""
    schedule = make_schedule("interleaved", P, M, V)
    check_schedule(schedule)
    assert (schedule.op == Op.FORWARD).sum() == V * P * M
    if M % P == 0:
        bounds = [min(V * M, V * P + P - 1 - 2 * s) for s in range(P)]
        assert assign_slots(schedule).per_stage.tolist() == bounds


@settings(deadline=None, max_examples=40)
@given(**sizes)
def test_the_v_has_the_memory_of_1f1b(P, M):
    """Qi et al., 2023: that of P microbatches, here of half a stage's blocks each."""
    schedule = make_schedule("zero-bubble-v", P, M, 2)
    check_schedule(schedule)
    assert schedule.folded
    assert (schedule.op == Op.WEIGHT).sum() == 2 * P * M
    assert assign_slots(schedule).per_stage.max() == min(2 * P, 2 * M)
    assert [schedule.stage_of(v) for v in range(2 * P)] == [*range(P), *range(P)[::-1]]


@settings(deadline=None, max_examples=20)
@given(**sizes)
def test_forward_only_runs_each_forward_once(P, M):
    schedule = forward_only_schedule(P, M)
    check_schedule(schedule, [1] * P)
    assert schedule.num_ticks == M + P - 1
    i, s = np.indices((M, P))
    np.testing.assert_array_equal(schedule.tick_of(Op.FORWARD), i + s)
    assert (schedule.tick_of(Op.BACKWARD) == -1).all()
    assert assign_slots(schedule).per_stage.tolist() == [1] * P


def test_tick_of_follows_the_published_formula():
    P, M = 4, 6
    i, s = np.indices((M, P))
    schedule = make_schedule("1f1b", P, M)
    np.testing.assert_array_equal(schedule.tick_of(Op.FORWARD), 2 * i + s)
    np.testing.assert_array_equal(schedule.tick_of(Op.BACKWARD), 2 * i + 2 * P - 1 - s)


@settings(deadline=None, max_examples=60)
@given(name=names, **sizes)
def test_slots_never_collide(name, P, M):
    schedule = make_schedule(name, P, M)
    slots = assign_slots(schedule)
    np.testing.assert_array_equal(slots.slot == -1, schedule.op == Op.IDLE)
    for s in range(P):
        owner = {}
        for op, i, slot in zip(
            schedule.op[:, s], schedule.microbatch[:, s], slots.slot[:, s], strict=True
        ):
            if op == Op.FORWARD:
                assert slot not in owner
                assert slot < slots.per_stage[s]
                owner[slot] = i
            elif op == (Op.WEIGHT if schedule.splits_backward else Op.BACKWARD):
                assert owner.pop(slot) == i
            elif op == Op.BACKWARD:
                assert owner[slot] == i
        assert not owner


def test_chain_is_open():
    assert chain(3, up=True) == ((0, 1), (1, 2))
    assert chain(3, up=False) == ((1, 0), (2, 1))
    assert chain(1, up=True) == ()
    assert chain(3, up=True, ring=True) == ((0, 1), (1, 2), (2, 0))


def test_lanes_are_permutes():
    assert lanes(4, ((0, 1), (1, 0), (2, 3))) == (((0, 1), (1, 0), (2, 3)),)
    assert lanes(4, ((0, 1), (2, 1), (3, 0))) == (((0, 1), (3, 0)), ((2, 1),))
    assert lanes(4, ()) == ((),)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("P", "M", "fault"), [(0, 4, "num_stages=0"), (4, 0, "num_microbatches=0")]
)
def test_builders_refuse_sizes_below_one(name, P, M, fault):
    with pytest.raises(ValueError, match=fault):
        make_schedule(name, P, M)


def test_chunks_are_for_interleaving():
    with pytest.raises(ValueError, match=r"'1f1b' runs one chunk .* num_chunks=2; choose interl"):
        make_schedule("1f1b", 4, 8, 2)
    with pytest.raises(ValueError, match="num_chunks=0 must be at least 1"):
        make_schedule("interleaved", 4, 8, 0)
    with pytest.raises(ValueError, match=r"runs two chunks .* num_chunks=3; choose interleaved"):
        make_schedule("zero-bubble-v", 4, 8, 3)


def test_unknown_schedule_names_the_known():
    with pytest.raises(ValueError, match=r"'pipedream' is unknown.*gpipe, 1f1b, 1f1b-overlap"):
        make_schedule("pipedream", 4, 8)


def test_two_operations_in_one_cell_are_refused():
    with pytest.raises(ValueError, match="tick 1 of stage 0: microbatches 1 and 0"):
        from_ticks(
            "clash",
            1,
            2,
            forward_tick=lambda i, s: i,
            backward_tick=lambda j, s: j + 1,
            hop=1,
            routes=((),),
            route_of_tick=lambda t: 0,
        )


def test_public_names_are_an_explicit_list():
    assert sorted(jpipe.schedule.__all__) == [
        "CostModel",
        "Op",
        "Route",
        "SCHEDULES",
        "Schedule",
        "Simulation",
        "Slots",
        "assign_slots",
        "check_schedule",
        "draw_text",
        "forward_only_schedule",
        "gpipe_schedule",
        "interleaved_schedule",
        "make_schedule",
        "one_f_one_b_overlap_schedule",
        "one_f_one_b_schedule",
        "read_schedule",
        "save_figure",
        "schedule_from_cells",
        "schedule_to_cells",
        "simulate_schedule",
        "write_schedule",
        "zero_bubble_overlap_schedule",
        "zero_bubble_schedule",
        "zero_bubble_v_schedule",
    ]
    assert all(hasattr(jpipe.schedule, name) for name in jpipe.schedule.__all__)


def test_import_needs_neither_jax_nor_the_drawing_libraries():
    probe = (
        "import sys, jpipe.schedule\n"
        "heavy = {'jax', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
