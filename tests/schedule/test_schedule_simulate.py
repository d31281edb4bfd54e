"""The simulator: exact times, who waits for whom, and why only pairs meet."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe.schedule import (
    SCHEDULES,
    CostModel,
    Op,
    assign_slots,
    forward_only_schedule,
    make_schedule,
    simulate_schedule,
)
from jpipe.schedule.simulate import with_chain_exchange
from jpipe.schedule.table import chain


@pytest.mark.parametrize("P", range(1, 17))
def test_1f1b_takes_the_ideal_time_exactly(P):
    for M in range(1, 65):
        found = simulate_schedule(make_schedule("1f1b", P, M), CostModel(1.0, 2.0))
        assert found.makespan == (M + P - 1) * 3.0
        assert (found.idle == (P - 1) * 3.0).all()


@pytest.mark.parametrize("name", ["gpipe", "1f1b-overlap"])
@pytest.mark.parametrize(("P", "M"), [(1, 1), (1, 8), (4, 2), (4, 8), (8, 32), (16, 64)])
def test_the_other_schedules_take_the_ideal_time_if_links_are_free(name, P, M):
    found = simulate_schedule(make_schedule(name, P, M), CostModel(1.0, 2.0))
    assert found.makespan == (M + P - 1) * 3.0
    assert found.bubble == pytest.approx((P - 1) / (M + P - 1), abs=1e-12)


# Sizes with M below, at and above P, a multiple of it or not.
SIZES = [(2, 2), (2, 7), (4, 4), (4, 7), (4, 16), (8, 8), (8, 20), (16, 16), (16, 48), (16, 67)]


@pytest.mark.parametrize("V", [1, 2, 3, 4])
@pytest.mark.parametrize(("P", "M"), SIZES)
def test_interleaving_takes_its_published_time_for_any_number_of_microbatches(P, M, V):
    """Narayanan et al., 2021: the bubble is that of 1F1B divided by V."""
    found = simulate_schedule(make_schedule("interleaved", P, M, V), CostModel(1.0, 2.0))
    assert found.makespan == pytest.approx(M * 3 + (P - 1) * 3 / V, rel=1e-12)


@pytest.mark.parametrize(("B", "W"), [(1.0, 1.0), (1.4, 1.0), (2.0, 1.0)])
@pytest.mark.parametrize(("P", "M"), SIZES)
def test_zero_bubble_takes_its_published_time_also_if_parts_are_computed_again(P, M, B, W):
    """Qi et al., 2023: the bubble of ZB-H1 is (P - 1)(F + B - W)."""
    costs = CostModel(1.0, B + W, weight=W / (B + W))
    found = simulate_schedule(make_schedule("zero-bubble", P, M), costs)
    assert found.makespan == pytest.approx(M * (1 + B + W) + (P - 1) * (1 + B - W), rel=1e-12)
    assert found.peak_kept.max() == min(P, M)
    overlap = simulate_schedule(make_schedule("zero-bubble-overlap", P, M), costs)
    assert found.makespan - 1e-9 <= overlap.makespan <= M * (1 + B + W) + (P - 1) * (1 + B) + 1e-9


@pytest.mark.parametrize("P", [2, 3, 4, 8, 16])
def test_the_v_takes_its_published_time(P):
    """Qi et al., 2023: with operations that take as long, the bubble of ZB-V is that of filling."""
    for M in (P, *range(-(-3 * P // 2), 4 * P)):
        found = simulate_schedule(make_schedule("zero-bubble-v", P, M, 2), CostModel(2.0, 4.0))
        assert found.makespan == 6 * M + (P - 1)
    for M in range(P + 1, 3 * P // 2):
        found = simulate_schedule(make_schedule("zero-bubble-v", P, M, 2), CostModel(2.0, 4.0))
        assert 6 * M + (P - 1) <= found.makespan <= 6 * M + 2 * P - 3


@pytest.mark.parametrize("M", [1, 2, 3])
@pytest.mark.parametrize("P", [2, 4, 8, 16])
def test_the_v_halves_the_bubble_of_zero_bubble(P, M):
    M *= P
    found = simulate_schedule(make_schedule("zero-bubble-v", P, M, 2), CostModel(2.0, 4.0))
    plain = simulate_schedule(make_schedule("zero-bubble", P, M), CostModel(2.0, 4.0))
    assert plain.makespan == 6 * M + 2 * (P - 1)
    links = simulate_schedule(make_schedule("zero-bubble-v", P, M, 2), CostModel(2.0, 4.0, 0.1))
    assert links.makespan <= found.makespan * 1.1 + 0.1


@pytest.mark.parametrize(("P", "M"), SIZES)
def test_a_cheap_weight_gradient_fills_less(P, M):
    costs = CostModel(1.0, 1.7, weight=0.7 / 1.7)
    found = simulate_schedule(make_schedule("zero-bubble", P, M), costs)
    assert 0.999 < found.makespan / (M * 2.7 + (P - 1) * 1.3) < 1.08


def test_weight_gradients_hide_the_exchange_where_it_is_known_when_compiled():
    picked = make_schedule("zero-bubble", 4, 16)
    both = chain(4, up=True) + chain(4, up=False)
    known = dataclasses.replace(picked, routes=(both,), route=np.zeros_like(picked.route))
    beside = (picked.op[1:] == Op.WEIGHT) & (picked.op[:-1] != Op.IDLE)
    costs = CostModel(1.0, 2.0, 0.5)
    assert (simulate_schedule(known, costs).wait[:-1][beside] == 0).all()
    assert (simulate_schedule(picked, costs).wait[:-1][beside] > 0).any()


def test_zero_bubble_overlap_hides_its_links():
    overlap, plain = (
        simulate_schedule(make_schedule(name, 4, 32), CostModel(1.0, 2.0, 0.5)).makespan
        for name in ("zero-bubble-overlap", "zero-bubble")
    )
    assert overlap == 32 * 3 + 3 * 2 + 2 * 3 * 0.5  # each link once up and once down
    assert plain > 1.2 * overlap


@pytest.mark.parametrize(
    ("P", "M", "ratio"), [(4, 8, 40 / 33), (8, 32, 148 / 117), (16, 64, 300 / 237)]
)
def test_an_exchange_along_the_whole_chain_costs_a_fifth_to_a_quarter_more(P, M, ratio):
    schedule = make_schedule("1f1b", P, M)
    pairs = simulate_schedule(schedule, CostModel()).makespan
    chain = simulate_schedule(with_chain_exchange(schedule), CostModel()).makespan
    assert 1.21 < chain / pairs < 1.27
    assert chain / pairs == ratio


def test_hop_1_by_hand():
    """F 0-1 | link 1-2 | F 2-3 | B 3-5 | link 5-6 | B 6-8; the other stage waits meanwhile."""
    found = simulate_schedule(make_schedule("1f1b", 2, 1), CostModel(1.0, 2.0, 1.0))
    nan = np.nan
    np.testing.assert_array_equal(found.start, [[0, nan], [nan, 2], [nan, 3], [6, nan]])
    np.testing.assert_array_equal(found.end, [[1, nan], [nan, 3], [nan, 5], [8, nan]])
    np.testing.assert_array_equal(found.wait, [[1, 2], [0, 0], [4, 1], [0, 0]])
    assert found.makespan == 8
    np.testing.assert_array_equal(found.idle, [5, 5])
    assert found.bubble == 5 / 8
    assert found.peak_kept.tolist() == [1, 1]


def test_hop_2_by_hand():
    """The same times; each exchange now fills a tick in which nobody works."""
    found = simulate_schedule(make_schedule("1f1b-overlap", 2, 1), CostModel(1.0, 2.0, 1.0))
    nan = np.nan
    start = [[0, nan], [nan, nan], [nan, 2], [nan, 3], [nan, nan], [6, nan]]
    np.testing.assert_array_equal(found.start, start)
    np.testing.assert_array_equal(found.wait, [[0, 0], [1, 2], [1, 0], [1, 0], [2, 1], [0, 1]])
    assert found.makespan == 8


def test_hop_2_exchanges_in_the_tick_after_the_one_that_made_it():
    overlap = make_schedule("1f1b-overlap", 2, 4)
    only_up = dataclasses.replace(overlap, routes=(overlap.routes[0], ()))
    wait = simulate_schedule(only_up, CostModel(1.0, 2.0, 5.0)).wait
    # What even ticks made travels in odd ones.
    assert (wait[1::2] > 0).all()
    assert (wait[0::2] == 0).all()


def test_a_stage_with_two_partners_waits_for_both():
    schedule = forward_only_schedule(3, 1)
    found = simulate_schedule(schedule, CostModel((5.0, 1.0, 1.0), 1.0, 0.5))
    # After tick 0 stage 1 waits for stage 0; stage 2 waits for nobody but stage 1, who is there.
    np.testing.assert_array_equal(found.wait[0], [0.5, 5.5, 0.5])
    assert found.start[1, 1] == 5.5


def test_a_stage_without_an_edge_goes_on_at_once():
    """In 1F1B only 1 and 2 meet after tick 1, however slow stage 3 is."""
    found = simulate_schedule(make_schedule("1f1b", 4, 8), CostModel((1, 1, 1, 9), 2.0, 0.5))
    np.testing.assert_array_equal(found.wait[1, [0, 3]], 0)
    assert (found.wait[1, 1:3] > 0).all()


def test_overlap_hides_the_link_that_1f1b_waits_for():
    P, M = 8, 32
    costs = CostModel(1.0, 2.0, 1.0)
    overlap = simulate_schedule(make_schedule("1f1b-overlap", P, M), costs).makespan
    plain = simulate_schedule(make_schedule("1f1b", P, M), costs).makespan
    # A microbatch passes every link once up and once down before the pipeline is full; what
    # follows hides the links.
    assert overlap == (M + P - 1) * 3 + 2 * (P - 1)
    assert plain > 1.4 * overlap


def test_forwards_alone():
    found = simulate_schedule(forward_only_schedule(4, 8), CostModel(2.0, 100.0))
    assert found.makespan == (8 + 4 - 1) * 2.0
    assert found.peak_kept.tolist() == [1] * 4


@st.composite
def cases(draw):
    P, M = draw(st.integers(1, 6)), draw(st.integers(1, 10))
    name = draw(st.sampled_from([*sorted(SCHEDULES), "forward-only"]))
    schedule = forward_only_schedule(P, M) if name == "forward-only" else make_schedule(name, P, M)
    cost = st.floats(0.01, 100)
    per_stage = st.one_of(cost, st.lists(cost, min_size=P, max_size=P))
    costs = draw(per_stage), draw(per_stage), draw(st.floats(0, 10)), draw(st.floats(0.1, 0.9))
    return schedule, CostModel(*costs)


@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_what_holds_for_all_costs(case):
    schedule, costs = case
    found = simulate_schedule(schedule, costs)
    runs = schedule.op != Op.IDLE
    np.testing.assert_array_equal(np.isnan(found.start), ~runs)
    length = np.where(runs, found.end - found.start, 0)
    for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT):
        cost = np.broadcast_to(costs.per_stage(op, schedule), runs.shape)
        np.testing.assert_allclose(length[schedule.op == op], cost[schedule.op == op])
    np.testing.assert_allclose(length.sum(axis=0) + found.idle, found.makespan)
    assert 0 <= found.bubble < 1
    assert (found.wait >= 0).all()
    assert found.makespan >= np.nanmax(found.end)
    np.testing.assert_array_equal(found.peak_kept, assign_slots(schedule).per_stage)
    # Nobody starts before the link has brought the input.
    slack = 1e-9 * found.makespan
    for op, step in ((Op.FORWARD, 1), (Op.BACKWARD, -1)):
        tick = schedule.tick_of(op)
        for s in range(schedule.num_stages):
            if 0 <= s + step < schedule.num_stages and (tick >= 0).all():
                made = found.end[tick[:, s], s] + costs.link
                used = found.start[tick[:, s + step], s + step]
                assert (used >= made - slack).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": 0.0}, "forward=0.0 must be a finite time above 0"),
        ({"forward": (1.0, -1.0)}, r"forward=\(1.0, -1.0\) must be a finite time above 0"),
        ({"backward": float("nan")}, "backward=nan must be"),
        ({"backward": float("inf")}, "backward=inf must be"),
        ({"backward": ()}, r"backward=\(\) must be"),
        ({"forward": ((1.0, 2.0),)}, "or one such time for each stage"),
        ({"link": -0.1}, "link=-0.1 must be a finite time of at least 0"),
        ({"link": float("nan")}, "link=nan must be"),
        ({"weight": 0.0}, "weight=0.0 must be a share above 0 and below 1"),
        ({"weight": 1.0}, "weight=1.0 must be"),
    ],
)
def test_costs_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CostModel(**arguments)


def test_costs_for_another_number_of_stages_are_refused():
    costs = CostModel(backward=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match=r"backward=.* one for each of the 4 stages"):
        simulate_schedule(make_schedule("1f1b", 4, 8), costs)


def test_an_unknown_hop_is_refused():
    schedule = dataclasses.replace(make_schedule("1f1b", 4, 8), hop=3)
    with pytest.raises(ValueError, match="hop=3 of schedule '1f1b' must be 1 or 2"):
        simulate_schedule(schedule, CostModel())
