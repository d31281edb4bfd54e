"""Where a pipeline may run, and inside of what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from parity import models
from parity.cases import assert_same, reference_numbers
from pipeline.variants import SIZE, P, assert_parity, base, model, on_mesh

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    param_shardings,
    pipeline_value_and_grad,
)
from jpipe.reference import reference_value_and_grad
from jpipe.schedule import Schedule, check_schedule, make_schedule


def test_mesh_with_the_stage_axis_only():
    mesh = Mesh(np.array(jax.devices()[:P]), ("stage",))
    for lay_out in (False, True):
        assert_same(on_mesh(base(), mesh, lay_out=lay_out), reference_numbers(base()))


def test_mesh_with_the_data_axis_first():
    mesh = Mesh(np.array(jax.devices()).reshape(2, P), ("data", "stage"))
    assert_same(on_mesh(base(), mesh, lay_out=True), reference_numbers(base()))


def test_arrays_that_lie_otherwise():
    mesh = make_mesh(P, 2)
    problem = models.mlp(P, 8, size=SIZE)

    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    params = problem.params._replace(
        stem={"w": put(problem.params.stem["w"], None, "data")},
        body={"w": put(problem.params.body["w"]), "b": put(problem.params.body["b"], None, "data")},
    )
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh)
    actual = run(params, put(problem.inputs, "stage", "data"), put(problem.targets, "data"))
    assert_same(actual, reference_numbers(problem))


def test_gradients_lie_where_their_parameters_do():
    mesh = make_mesh(P, 2)
    _, grads = on_mesh(base(), mesh, lay_out=False)
    shardings = param_shardings(mesh, base().params)
    for g, sharding in zip(jax.tree.leaves(grads), jax.tree.leaves(shardings), strict=True):
        assert g.sharding.is_equivalent_to(sharding, g.ndim)


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_in_a_scan_in_a_jit():
    problem = base()

    def steps(value_and_grad):
        def step(params, _):
            loss, grads = value_and_grad(params, problem.inputs, problem.targets)
            return descend(params, grads), loss

        params, losses = jax.jit(lambda p: jax.lax.scan(step, p, length=4))(problem.params)
        return losses, params

    piped = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(P))
    plain = reference_value_and_grad(problem.stages, problem.loss)
    assert_same(steps(piped), steps(plain))


def test_closures_over_values_of_an_outer_jit():
    # A dropout key of each step, for one.
    def build(make, scale, key):
        def block(p, x):
            mask = jax.random.bernoulli(key, 0.7, x.shape)
            return x + jnp.tanh(x @ p["w"] + p["b"]) * mask * scale

        problem = model(stem=lambda p, x: x @ p["w"] * scale, block=block)
        return make(problem.stages, problem.loss)(problem.params, problem.inputs, problem.targets)

    def piped(stages, loss):
        return pipeline_value_and_grad(stages, loss, make_mesh(P))

    arguments = jnp.float32(1.5), jax.random.key(7)
    actual = jax.jit(functools.partial(build, piped))(*arguments)
    assert_same(actual, jax.jit(functools.partial(build, reference_value_and_grad))(*arguments))


def test_donated_parameters():
    problem, mesh = base(), make_mesh(P)
    value_and_grad = pipeline_value_and_grad(problem.stages, problem.loss, mesh)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, inputs, targets):
        loss, grads = value_and_grad(params, inputs, targets)
        return loss, descend(params, grads)

    shardings = param_shardings(mesh, problem.params)
    params = jax.device_put(jax.tree.map(np.array, problem.params), shardings)
    actual = step(params, problem.inputs, problem.targets)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    loss, grads = reference_numbers(problem)
    assert_same(actual, (loss, descend(problem.params, grads)))


def test_compiled_ahead_of_time_and_vmapped():
    problem = base()
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(P))
    arguments = problem.params, problem.inputs, problem.targets
    expected = reference_numbers(problem)
    assert_same(run.lower(*arguments).compile()(*arguments), expected)
    both = jax.vmap(lambda x: run(problem.params, x, problem.targets))(
        jnp.stack([problem.inputs, 2 * problem.inputs])
    )
    assert_same(jax.tree.map(lambda a: a[0], both), expected)


def test_a_table_of_ones_own():
    # GPipe for the first two microbatches, then 1F1B for three: routes without a period.
    first, second = make_schedule("gpipe", P, 2), make_schedule("1f1b", P, 3)
    later = np.where(second.microbatch >= 0, second.microbatch + 2, -1)
    table = Schedule(
        name="mixed",
        num_stages=P,
        num_microbatches=5,
        op=np.concatenate([first.op, second.op]),
        microbatch=np.concatenate([first.microbatch, later]),
        chunk=np.concatenate([first.chunk, second.chunk]),
        hop=1,
        routes=first.routes + second.routes,
        route=np.concatenate([first.route, second.route + len(first.routes)]),
    )
    check_schedule(table)
    assert_parity(base(), table)
