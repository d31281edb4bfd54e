import itertools

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from jpipe.adapters.split import balanced_split, flops


def worst(costs, cuts, first, last):
    stages = [sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)])]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_no_other_cut_is_better(costs, num_stages, first, last):
    num_stages = min(num_stages, len(costs))
    cuts = balanced_split(costs, num_stages, first=first, last=last)
    every = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert cuts in set(itertools.combinations(range(1, len(costs)), num_stages - 1))
    assert worst(costs, cuts, first, last) == min(worst(costs, c, first, last) for c in every)


def test_equal_layers():
    cuts = balanced_split([1.0] * 30, 4)
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, 30])]
    assert sorted(sizes) == [7, 7, 8, 8]


def test_flops_of_a_product():
    a, b = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert flops(jnp.matmul, a, b) == 2 * 4 * 8 * 16
