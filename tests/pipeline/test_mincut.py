"""Minimum vertex cuts, against trying every set of vertices."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe.pipeline.mincut import minimum_vertex_cut


def separates(cut, edges, sources, targets):
    """Whether no path leads from a source to a target without a vertex of the cut."""
    seen, queue = set(), [v for v in sources if v not in cut]
    while queue:
        u = queue.pop()
        if u in seen:
            continue
        seen.add(u)
        queue += [v for w, v in edges if w == u and v not in cut]
    return seen.isdisjoint(targets)


def brute_force(cost, edges, sources, targets):
    """Every cheapest cut without a vertex too many."""
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(cost)), k) for k in range(len(cost) + 1)
    )
    cuts = [set(c) for c in subsets if separates(set(c), edges, sources, targets)]
    least = min(sum(cost[v] for v in cut) for cut in cuts)
    cheapest = [cut for cut in cuts if sum(cost[v] for v in cut) == least]
    return least, [c for c in cheapest if not any(other < c for other in cheapest)]


@st.composite
def problems(draw, least_cost=0):
    n = draw(st.integers(1, 7))
    vertices = st.sets(st.integers(0, n - 1))
    cost = draw(st.lists(st.integers(least_cost, 6), min_size=n, max_size=n))
    pairs = [(u, v) for u in range(n) for v in range(u + 1, n)]
    edges = [pair for pair in pairs if draw(st.booleans())]
    return cost, edges, sorted(draw(vertices)), sorted(draw(vertices))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_no_cut_is_cheaper(problem):
    cost, edges, sources, targets = problem
    cut = minimum_vertex_cut(cost, edges, sources, targets)
    least, _ = brute_force(cost, edges, sources, targets)
    assert separates(set(cut), edges, sources, targets)
    assert cut == sorted(set(cut))
    # A vertex of no cost counts as 1, so that it is not cut for nothing.
    charged = [max(1, c) for c in cost]
    assert sum(charged[v] for v in cut) == brute_force(charged, edges, sources, targets)[0]
    assert sum(cost[v] for v in cut) >= least


@settings(max_examples=200, deadline=None)
@given(problems(least_cost=1))
def test_of_several_the_one_nearest_to_the_targets(problem):
    cost, edges, sources, targets = problem
    cut = set(minimum_vertex_cut(cost, edges, sources, targets))
    _, cheapest = brute_force(cost, edges, sources, targets)
    assert cut in cheapest
    for other in cheapest:
        # Nearest: what any other cut separates from the targets, this one does, too.
        assert separates(cut, edges, other, targets)


@settings(max_examples=50, deadline=None)
@given(problems(least_cost=1), st.sampled_from([10**6, 10**9, 10**12]))
def test_large_costs(problem, scale):
    cost, edges, sources, targets = problem
    large = [scale * c for c in cost]
    cut = minimum_vertex_cut(large, edges, sources, targets)
    assert sum(cost[v] for v in cut) == brute_force(cost, edges, sources, targets)[0]


@pytest.mark.parametrize(
    ("cost", "edges", "sources", "targets", "cut"),
    [
        # A chain: the cheapest of it; the last of several.
        ([3, 1, 2], [(0, 1), (1, 2)], [0], [2], [1]),
        ([1, 1, 1], [(0, 1), (1, 2)], [0], [2], [2]),
        # Fan out and in: one vertex rather than three.
        ([2, 1, 1, 1, 3], [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)], [0], [4], [0]),
        ([4, 1, 1, 1, 4], [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)], [0], [4], [1, 2, 3]),
        # A source that is a target has to be cut, whatever it costs.
        ([9], [], [0], [0], [0]),
        ([9, 1], [(0, 1)], [0, 1], [0, 1], [0, 1]),
        ([9, 1], [(0, 1)], [0], [0, 1], [0]),
        # No path, no sources, no targets: nothing to cut.
        ([1, 1], [], [0], [1], []),
        ([1, 1], [(0, 1)], [], [1], []),
        ([1, 1], [(0, 1)], [0], [], []),
        # No cost: still to be cut, and preferred.
        ([0], [], [0], [0], [0]),
        ([5, 0, 5], [(0, 1), (1, 2)], [0], [2], [1]),
        # The same edge twice, and a cycle.
        ([2, 1, 2], [(0, 1), (0, 1), (1, 2)], [0], [2], [1]),
        ([2, 1, 2], [(0, 1), (1, 0), (1, 2)], [0], [2], [1]),
    ],
)
def test_by_hand(cost, edges, sources, targets, cut):
    assert minimum_vertex_cut(cost, edges, sources, targets) == cut
