"""The cheapest set of values to keep, as a minimum vertex cut."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

_CAPACITY = 2**30  # scipy's flows are int32


def minimum_vertex_cut(
    cost: Sequence[int],
    edges: Iterable[tuple[int, int]],
    sources: Iterable[int],
    targets: Iterable[int],
) -> list[int]:
    """The cheapest vertices that lie on every path from a source to a target.

    Of several cheapest cuts, the one nearest to the targets. Sources and targets may themselves be
    cut. Costs are exact up to a total of 2^29 and rounded to about 1e-9 of the total above it.

    Args:
        cost: what it costs to cut each vertex, at least 0.
        edges: directed edges between vertices.
        sources: vertices where paths begin.
        targets: vertices where paths end.

    Returns:
        The cut vertices, ascending.
    """
    n = len(cost)
    if not n:
        return []
    source, sink = 2 * n, 2 * n + 1
    unit = max(1, sum(cost) // 2**29)
    # Vertex v is an edge 2v -> 2v + 1; a vertex of no cost still has to be cut, hence at least 1.
    capacity = {(2 * v, 2 * v + 1): max(1, c // unit) for v, c in enumerate(cost)}
    capacity |= {(2 * u + 1, 2 * v): _CAPACITY for u, v in edges}
    capacity |= {(source, 2 * v): _CAPACITY for v in sources}
    capacity |= {(2 * v + 1, sink): _CAPACITY for v in targets}
    after = _reaches(sink, _residual(capacity, 2 * n + 2, source, sink))
    return [v for v in range(n) if 2 * v + 1 in after and 2 * v not in after]


def _residual(
    capacity: Mapping[tuple[int, int], int], n: int, source: int, sink: int
) -> dict[int, list[int]]:
    """For each vertex, those with capacity left towards it once the flow is greatest."""
    tail, head = np.array(list(capacity), np.int32).T
    graph = csr_array((np.array(list(capacity.values()), np.int32), (tail, head)), shape=(n, n))
    left = (graph - maximum_flow(graph, source, sink).flow).tocoo()
    into: dict[int, list[int]] = {}
    for u, v, spare in zip(left.row, left.col, left.data, strict=True):
        if spare > 0:
            into.setdefault(int(v), []).append(int(u))
    return into


def _reaches(goal: int, into: Mapping[int, Sequence[int]]) -> set[int]:
    """The vertices from which `goal` can be reached."""
    seen, queue = {goal}, deque([goal])
    while queue:
        for u in into.get(queue.popleft(), ()):
            if u not in seen:
                seen.add(u)
                queue.append(u)
    return seen
