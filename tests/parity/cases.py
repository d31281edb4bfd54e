"""The one table of parity cases, and the tolerances by dtype."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.mesh import make_mesh
from jpipe.pipeline import batch_sharding, param_shardings, pipeline_value_and_grad
from jpipe.reference import reference_value_and_grad
from jpipe.schedule import SCHEDULES

# P and M: fewer microbatches than stages, as many, more, and many more.
SIZES = [
    *itertools.product([1], [1, 4]),
    *itertools.product([2], [1, 3, 8]),
    *itertools.product([3], [2, 5]),
    *itertools.product([4], [1, 4, 5, 16]),
    *itertools.product([8], [5, 16]),
]
CASES = [(schedule, *sizes) for schedule in SCHEDULES for sizes in SIZES]

# One schedule for each way in which the executor works: exchanges before the next operation, beside
# it, and picked at run time, that with a backward cut in two.
WAYS = ["1f1b", "1f1b-overlap", "zero-bubble"]

# Largest error of a gradient leaf, relative to the leaf's largest value.
TOLERANCE = {"float64": 1e-11, "float32": 1e-6, "bfloat16": 2e-2, "float16": 2.5e-3}
TOLERANCE["float32, batch norms"] = 1e-5  # they divide by how little a microbatch varies


def place(problem, mesh):
    """Parameters, inputs and targets where the pipeline wants them."""
    params = jax.device_put(problem.params, param_shardings(mesh, problem.params))
    return params, *jax.device_put((problem.inputs, problem.targets), batch_sharding(mesh))


def pipeline_numbers(problem, schedule, num_stages, num_data=1):
    """Loss and gradients by the pipeline."""
    mesh = make_mesh(num_stages, num_data)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, schedule)
    return run(*place(problem, mesh))


def reference_numbers(problem):
    """Loss and gradients on one device."""
    run = reference_value_and_grad(problem.stages, problem.loss)
    return run(problem.params, problem.inputs, problem.targets)


def assert_same(actual, expected, tolerance=TOLERANCE["float32"], floor=0.0):
    """The loss and every gradient leaf agree; errors are relative to the leaf's largest value.

    With `floor`, relative to at least that share of the largest value of all leaves: for gradients
    that are zero but for rounding, such as that of a bias before a softmax.
    """
    (loss, grads), (expected_loss, expected_grads) = actual, expected
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    leaves = jax.tree_util.tree_leaves_with_path((loss, grads))
    wanted = jax.tree.leaves((expected_loss, expected_grads))
    least = floor * max(float(np.abs(np.asarray(want)).max()) for want in wanted)
    for (path, leaf), want in zip(leaves, wanted, strict=True):
        assert leaf.shape == want.shape
        assert leaf.dtype == want.dtype
        a, b = np.asarray(leaf), np.asarray(want)
        largest = max(np.abs(b).max(), jnp.finfo(jnp.promote_types(b.dtype, jnp.float32)).tiny)
        error = np.abs(a - b).max() / max(largest, least)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.2e} > {tolerance:.0e}"
