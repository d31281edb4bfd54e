"""State that microbatches update, and random numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import models
from parity.cases import WAYS, assert_same, place

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    Params,
    Stages,
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
)
from jpipe.pipeline.residuals import split_gradient
from jpipe.reference import reference_value_and_grad


@functools.cache
def reference(num_blocks, num_microbatches, size=4):
    problem, state, key = models.carrying(num_blocks, num_microbatches, size=size)
    run = reference_value_and_grad(problem.stages, problem.loss)
    return run(problem.params, problem.inputs, problem.targets, state, key)


def pipelined(carried, schedule, num_stages, num_data=1):
    problem, state, key = carried
    mesh = make_mesh(num_stages, num_data)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, schedule)
    state = jax.device_put(state, param_shardings(mesh, state))
    return run(*place(problem, mesh), state, key)


def stacked(tree):
    """The blocks of stages that differ, stacked as where they are alike."""
    blocks = {k: v for own in tree.body for k, v in own.items()}
    body = jax.tree.map(lambda *a: jnp.stack(a), *(blocks[k] for k in sorted(blocks)))
    return tree._replace(body=body)


def assert_equals_one_device(actual, expected):
    (loss, grads, state), (wanted_loss, wanted_grads, wanted_state) = actual, expected
    assert_same((loss, grads), (wanted_loss, wanted_grads))
    assert_same((loss, state), (wanted_loss, wanted_state))


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 5), (4, 1), (4, 8)])
def test_equals_one_device(schedule, num_stages, num_microbatches):
    actual = pipelined(models.carrying(4, num_microbatches), schedule, num_stages)
    assert_equals_one_device(actual, reference(4, num_microbatches))
    assert int(actual[2].head["count"]) == num_microbatches


@pytest.mark.slow
@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("num_stages", [1, 3, 4])
def test_stages_that_differ(schedule, num_stages):
    """Seven blocks: random numbers and state do not depend on how they are cut."""
    carried = models.carrying(7, 5, stages=num_stages, size=16)
    problem, state, key = carried
    loss, grads, state = pipelined(carried, schedule, num_stages)
    run = reference_value_and_grad(problem.stages, problem.loss)
    expected = run(problem.params, problem.inputs, problem.targets, carried.state, key)
    assert_equals_one_device((loss, grads, state), expected)
    stacked_loss, stacked_grads, stacked_state = reference(7, 5, size=16)
    assert_same((loss, stacked(grads)), (stacked_loss, stacked_grads), 2e-6)
    assert_same((loss, stacked(state)), (stacked_loss, stacked_state))


@pytest.mark.parametrize("recompute", ["block", "stage"])
def test_recomputation_draws_the_same(recompute):
    actual = pipelined(models.carrying(4, 5, recompute=recompute), "1f1b", 2)
    assert_equals_one_device(actual, reference(4, 5))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [None, 2])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (1, 8)])
def test_data_axis(mesh, stages):
    """Statistics are of the whole microbatch and its random numbers the same, however it lies."""
    if stages and mesh[0] != stages:
        stages = mesh[0]
    actual = pipelined(models.carrying(4, 5, size=8, stages=stages), "1f1b", *mesh)
    if stages:
        actual = (actual[0], stacked(actual[1]), stacked(actual[2]))
    assert_equals_one_device(actual, reference(4, 5, size=8))


def test_evaluation_reads_state_and_keeps_it():
    problem, state, key = models.carrying(4, 5)
    mesh = make_mesh(4)
    params, inputs, targets = place(problem, mesh)
    loss = pipeline_evaluate(problem.stages, problem.loss, mesh)(
        params, inputs, targets, state, key
    )
    outputs = pipeline_predict(problem.stages, mesh)(params, inputs, state, key)
    by_hand = jnp.mean((outputs - targets) ** 2)
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-6)


def test_masks_are_drawn_again_and_not_kept():
    def layer(params, key, x, _):
        return jnp.tanh(x @ params) * jax.random.bernoulli(key, 0.5, x.shape), ()

    w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    kept = split_gradient(layer, w, jax.random.key(0), x, ()).kept
    assert sorted(k.shape for k in kept) == [(4, 8), (4, 8)]  # input, tanh or its argument
    assert all(k.dtype == jnp.float32 for k in kept)


def test_what_moves_is_kept_only_if_the_backward_needs_it():
    def norm(params, _, x, state):
        return x * params, {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}

    def shifted(params, _, x, state):
        return x * params * state["mean"], {"mean": state["mean"] + 1}

    arguments = (jnp.ones(8), (), jnp.ones((4, 8)), {"mean": jnp.ones(8)})
    assert [k.shape for k in split_gradient(norm, *arguments).kept] == [(4, 8)]
    assert sorted(k.size for k in split_gradient(shifted, *arguments).kept) == [8, 32]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "other structure"}, "updates of the head's state do not have its structure"),
        ({"key": jnp.zeros(2, jnp.uint32)}, "typed key"),
        ({"state": {"stem": 1}}, r"Params\(stem, body, head\)"),
        ({"state": "key in it"}, "random key"),
        (
            {"state": "other dtype"},
            r"state.head\['count'\] is float32\[\], its update is int32\[\]",
        ),
        ({"state": "other blocks"}, "same number of blocks"),
    ],
)
def test_bad_state_is_refused(change, words):
    problem, state, key = models.carrying(4, 3)
    given = {"state": state, "key": key, **change}
    if given["state"] == "key in it":
        given["state"] = state._replace(head={"count": key})
    elif given["state"] in ("other dtype", "other structure"):
        name = "count" if given["state"] == "other dtype" else "counts"

        def head(p, s, x, key):
            return x @ p, {name: jnp.int32(1)}

        problem = problem._replace(
            stages=Stages(problem.stages.stem, problem.stages.body, head, stateful=True)
        )
        given["state"] = state._replace(head={"count": jnp.zeros(())})
    elif given["state"] == "other blocks":
        given["state"] = state._replace(body=jax.tree.map(lambda a: a[:2], state.body))
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(2))
    with pytest.raises(ValueError, match=words):
        run(problem.params, problem.inputs, problem.targets, **given)


def test_state_for_a_model_without_is_refused():
    problem = models.mlp(2, 2)
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(2))
    batch = (problem.params, problem.inputs, problem.targets)
    with pytest.raises(ValueError, match=r"key is given.*stateful=True"):
        run(*batch, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"state is given.*stateful=True"):
        run(*batch, Params({"mean": np.zeros(3)}, (), ()))


def tied(num_microbatches):
    """A matrix that the stem uses, and the head the other way round."""
    problem = models.mlp(4, num_microbatches)

    def tie(params):
        stem, body, head = params
        return Params(stem, body, {**head, "stem": stem["w"]})

    stages = Stages(
        problem.stages.stem,
        problem.stages.body,
        lambda p, x: (x @ p["stem"].T)[..., :3] + p["b"],
        tie=tie,
    )
    params = problem.params._replace(head={"b": problem.params.head["b"]})
    return problem._replace(stages=stages, params=params)


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2)])
def test_tied_parameters_get_the_gradients_of_all_uses(schedule, mesh):
    problem = tied(5)
    mesh = make_mesh(*mesh)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, schedule)
    batch = (problem.params, problem.inputs, problem.targets)
    expected = reference_value_and_grad(problem.stages, problem.loss)(*batch)
    assert_same(run(*place(problem, mesh)), expected)

    def plain(params):
        stem, body, head = problem.stages.tie(params)
        losses = [
            problem.loss(problem.stages.head(head, problem.stages.body(body, i @ stem["w"])), t)
            for i, t in zip(problem.inputs, problem.targets, strict=True)
        ]
        return sum(losses) / len(losses)

    assert_same(expected, jax.value_and_grad(plain)(problem.params), 2e-6)


def test_explicit_axes_over_which_xla_divides_the_work_are_refused():
    problem, state, key = models.carrying(4, 3, size=4)
    mesh = jax.make_mesh((2, 2), ("stage", "data"))
    batch = (problem.params, problem.inputs, problem.targets)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="'data' has the type Explicit"):
        run(*batch, state, key)
    mesh = jax.make_mesh((4, 1), ("stage", "data"))
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh)
    with jax.set_mesh(mesh):
        loss, _, _ = run(*batch, state, key)
    assert float(loss) == pytest.approx(float(reference(4, 3)[0]), rel=1e-6)


def test_functions_that_return_no_pair_are_refused():
    problem, state, key = models.carrying(2, 2)
    stages = Stages(lambda p, s, x, k: x @ p["w"], *problem.stages.parts[1:], stateful=True)
    run = pipeline_value_and_grad(stages, problem.loss, make_mesh(2))
    with pytest.raises(ValueError, match=r"the stem returns.*must return a pair"):
        run(problem.params, problem.inputs, problem.targets, state, key)


def test_updates_of_blocks_must_be_stacked():
    problem, state, key = models.carrying(2, 2)

    def body(p, s, x, keys):
        return x, {"norm": {"mean": jnp.zeros(()), "var": None}, "frozen": None}

    stages = Stages(problem.stages.stem, body, problem.stages.head, stateful=True)
    run = pipeline_value_and_grad(stages, problem.loss, make_mesh(2))
    with pytest.raises(ValueError, match=r"state\.body\['norm'\]\['mean'\] is .*its update is"):
        run(problem.params, problem.inputs, problem.targets, state, key)


def test_an_empty_state_for_a_model_without_is_fine():
    problem = models.mlp(2, 2)
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(2))
    *_, state = run(problem.params, problem.inputs, problem.targets, Params({}, {}, {}))
    assert not jax.tree.leaves(state)
