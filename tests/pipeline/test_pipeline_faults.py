"""Faults once found by attacking the pipeline, each with the right answer."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import printed
from parity import models
from parity.cases import assert_same, pipeline_numbers, reference_numbers

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    batch_sharding,
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
    repeat_block,
)
from jpipe.pipeline.mincut import minimum_vertex_cut
from jpipe.schedule import check_schedule, forward_only_schedule, make_schedule

P, M = 4, 5


def arguments(problem):
    return problem.params, problem.inputs, problem.targets


def build(problem, schedule="1f1b", mesh=None):
    return pipeline_value_and_grad(
        problem.stages, problem.loss, make_mesh(P) if mesh is None else mesh, schedule
    )


def test_a_table_without_backwards_does_not_train():
    # Gave a loss of 0 and gradients of 0 without a word.
    with pytest.raises(ValueError, match=r"'forward-only' has no backwards.*pipeline_evaluate"):
        build(models.mlp(P, M), forward_only_schedule(P, M))


def test_a_table_of_several_chunks_needs_a_model_of_as_many():
    # The chunks were ignored once, and the numbers wrong.
    problem = models.mlp(4, 4)
    run = build(problem, make_schedule("interleaved", 2, 4, 2), make_mesh(2))
    with pytest.raises(ValueError, match=r"is for 2 chunks a stage, the model is cut into 1"):
        run(*arguments(problem))


def test_a_table_with_more_routes_than_ticks():
    table = make_schedule("1f1b", 1, 1)
    table = dataclasses.replace(table, routes=(*table.routes, ()))
    check_schedule(table)
    problem = models.mlp(2, 1)
    assert_same(pipeline_numbers(problem, table, 1), reference_numbers(problem))


@pytest.mark.parametrize("convert", [lambda p: p._asdict(), lambda p: tuple(p)[:2], lambda p: 1.0])
def test_parameters_that_are_not_three_parts(convert):
    problem = models.mlp(P, M)
    mesh = make_mesh(P)
    params = convert(problem.params)
    with pytest.raises(ValueError, match=r"params is a .*Params\(stem, body, head\)"):
        build(problem)(params, problem.inputs, problem.targets)
    with pytest.raises(ValueError, match=r"params is a .*Params\(stem, body, head\)"):
        pipeline_predict(problem.stages, mesh)(params, problem.inputs)


def test_a_stem_that_makes_nothing():
    problem = models.mlp(P, M)
    stages = dataclasses.replace(problem.stages, stem=lambda p, x: {})
    with pytest.raises(ValueError, match="the stem's output holds no arrays"):
        build(problem._replace(stages=stages))(*arguments(problem))


def test_cut_of_nothing():
    assert minimum_vertex_cut([], [], [], []) == []


def test_a_constant_loss():
    problem = models.mlp(P, M)._replace(loss=lambda y, t: 1.0)
    loss, grads = build(problem)(*arguments(problem))
    assert float(loss) == 1
    assert not any(g.any() for g in jax.tree.leaves(grads))


def test_functions_may_be_objects_that_do_not_hash():
    @dataclasses.dataclass
    class Stem:
        scale: float

        def __call__(self, p, x):
            return x @ p["w"] * self.scale

    problem = models.mlp(P, M)
    problem = problem._replace(stages=dataclasses.replace(problem.stages, stem=Stem(2.0)))
    assert_same(pipeline_numbers(problem, "1f1b", P), reference_numbers(problem))


def test_arguments_that_lie_elsewhere_do_not_warn_of_new_functions():
    problem, mesh = (
        jax.tree.map(lambda a: np.asarray(a) if isinstance(a, jax.Array) else a, models.mlp(P, M)),
        make_mesh(P),
    )
    run = build(problem, mesh=mesh)
    params = jax.device_put(problem.params, param_shardings(mesh, problem.params))
    batch = problem.inputs, problem.targets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(problem.params, *batch)
        run(params, *batch)
        run(params, *jax.device_put(batch, batch_sharding(mesh)))


def test_models_that_differ_in_what_they_close_over_do_not_warn():
    problem = models.mlp(P, M)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for activation in (jnp.tanh, jnp.sin, jax.nn.gelu, jax.nn.relu):
            body = repeat_block(_block(activation))
            stages = dataclasses.replace(problem.stages, body=body)
            build(problem._replace(stages=stages))(*arguments(problem))


def _block(activation):
    return lambda p, x: x + activation(x @ p["w"])


def test_new_functions_of_the_same_things_still_warn():
    problem = models.mlp(P, M)

    def step():
        body = repeat_block(_block(jnp.tanh))
        build(problem._replace(stages=dataclasses.replace(problem.stages, body=body)))(
            *arguments(problem)
        )

    step()
    step()
    with pytest.warns(RuntimeWarning, match="define them once"):
        step()


@pytest.mark.parametrize("lay_out", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
def test_mesh_with_explicit_axes(lay_out, uneven):
    # What jax.make_mesh gives by default.
    problem = models.uneven((8, 8, 16, 4, 3), M) if uneven else models.mlp(P, M)
    mesh = jax.make_mesh((P, 2), ("stage", "data"))
    args = arguments(problem)
    if lay_out:
        batch = batch_sharding(mesh)
        args = jax.device_put(args, (param_shardings(mesh, problem.params), batch, batch))
    expected = reference_numbers(problem)
    assert_same(build(problem, mesh=mesh)(*args), expected)
    with jax.set_mesh(mesh):
        assert_same(build(problem, mesh=mesh)(*args), expected)
    loss = pipeline_evaluate(problem.stages, problem.loss, mesh)(*args)
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-6)
    outputs = pipeline_predict(problem.stages, mesh)(*args[:2])
    auto = pipeline_predict(problem.stages, make_mesh(P, 2))(*arguments(problem)[:2])
    np.testing.assert_allclose(outputs, auto, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 1), (-1, 1), (2, -1), (2, 0), (-2, -2)])
def test_mesh_of_less_than_one(shape):
    # (-1, 1) gave a mesh of seven stages.
    with pytest.raises(ValueError, match="must be at least 1"):
        make_mesh(*shape)


def test_float64_against_plain_autodiff():
    # The seed 1/M and the loss were rounded to float32, in the reference as well: 1.5e-8.
    code = """
    import jax, jax.numpy as jnp, numpy as np
    from jpipe.mesh import simulate_devices
    simulate_devices(4)
    jax.config.update("jax_enable_x64", True)
    from parity import models
    from parity.cases import assert_same, pipeline_numbers
    problem = models.mlp(4, 5, dtype=np.float64)
    s = problem.stages
    def run(p, x): return s.head(p.head, s.body(p.body, s.stem(p.stem, x)))
    def loss(p):
        each = jax.vmap(lambda x, t: problem.loss(run(p, x), t))
        return jnp.mean(each(problem.inputs, problem.targets))
    expected = jax.value_and_grad(loss)(problem.params)
    assert_same(pipeline_numbers(problem, "1f1b", 4), expected, 1e-12)
    print("same")
    """
    assert printed(code) == ["same"]


def test_effects_in_the_model_happen_once_a_microbatch(capfd):
    problem = models.mlp(P, M)

    def block(p, x):
        jax.debug.print("block {}", x.sum())
        return x + jnp.tanh(x @ p["w"] + p["b"])

    stages = dataclasses.replace(problem.stages, body=repeat_block(block))
    jax.block_until_ready(build(problem._replace(stages=stages))(*arguments(problem)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("block ") == P * M


@pytest.mark.parametrize("held", [(jnp.ones(3), [1.0]), {"a": [2.0]}, [jnp.zeros(2)]], ids=str)
def test_functions_may_close_over_anything(held):
    problem = models.mlp(P, M)

    def loss(y, t):
        return jnp.mean((y - t) ** 2) + 0 * len(held)

    def unfilled(y, t):
        return loss(y, t) if never is None else never  # noqa: F821

    for function in (loss, lambda y, t: loss(y, t)):
        build(problem._replace(loss=function))(*arguments(problem))
    never = None
    del never
    build(problem._replace(loss=lambda y, t, f=unfilled: loss(y, t)))(*arguments(problem))


def test_predictions_need_an_examples_dim():
    problem = models.mlp(P, M)
    stages = dataclasses.replace(problem.stages, head=lambda p, x: jnp.mean(x @ p["w"]))
    with pytest.raises(ValueError, match=r"head's output is a scalar.*examples"):
        pipeline_predict(stages, make_mesh(P))(problem.params, problem.inputs)


def test_a_head_that_does_not_fit_is_named():
    problem = models.mlp(P, M)
    stages = dataclasses.replace(problem.stages, head=lambda p, x: x @ p["w"].T)
    with pytest.raises(ValueError, match=r"the head does not take float32\[4, 8\]"):
        build(problem._replace(stages=stages))(*arguments(problem))
