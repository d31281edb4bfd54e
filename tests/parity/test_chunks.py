"""Several chunks of the body on each stage."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import models
from parity.cases import assert_same, pipeline_numbers, place, reference_numbers

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.pipeline import (
    Chunks,
    PerStage,
    fsdp,
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
    repeat_block,
)
from jpipe.reference import reference_value_and_grad
from jpipe.schedule import schedule_from_cells

# V, P and M: fewer microbatches than stages, as many, more, a multiple, and with a remainder.
SIZES = [(3, 1, 2), (2, 2, 1), (2, 2, 4), (3, 2, 5), (2, 3, 3), (2, 4, 7)]
BOTH = ["interleaved", "zero-bubble-v"]


def cut(tree, num_chunks):
    """A body of stacked blocks, or of stages that differ, in equal chunks."""
    if isinstance(tree, PerStage):
        size = len(tree) // num_chunks
        return Chunks(*(PerStage(*list(tree)[c * size :][:size]) for c in range(num_chunks)))
    pieces = jax.tree.map(lambda a: np.split(np.asarray(a), num_chunks), tree)
    return Chunks(
        *(jax.tree.map(lambda _, own, c=c: own[c], tree, pieces) for c in range(num_chunks))
    )


def joined(body):
    """The inverse."""
    if isinstance(body[0], PerStage):
        return PerStage(*(own for chunk in body for own in chunk))
    return jax.tree.map(lambda *a: np.concatenate(a), *body)


def chunked(problem, num_chunks):
    body = problem.stages.body
    alike = not isinstance(body, PerStage)
    body = Chunks(*[body] * num_chunks) if alike else cut(body, num_chunks)
    params = problem.params._replace(body=cut(problem.params.body, num_chunks))
    stages = dataclasses.replace(problem.stages, body=body)
    return problem._replace(stages=stages, params=params)


def assert_whole_agrees(problem, num_chunks, num_stages, num_data=1, schedule="interleaved"):
    own = chunked(problem, num_chunks)
    loss, grads = pipeline_numbers(own, schedule, num_stages, num_data)
    assert_same((loss, grads), reference_numbers(own))
    whole = grads._replace(body=joined(grads.body))
    assert_same((loss, whole), reference_numbers(problem))


@pytest.mark.parametrize(("V", "P", "M"), SIZES)
def test_equals_one_device(V, P, M):
    assert_whole_agrees(models.mlp(V * P, M), V, P)


@pytest.mark.parametrize(("P", "M"), [(1, 2), (2, 1), (2, 5), (3, 3), (4, 7), (4, 16)])
def test_there_and_back_again_equals_one_device(P, M):
    """Where every other chunk goes back, pieces are brought to where they run."""
    assert_whole_agrees(models.mlp(2 * P, M), 2, P, schedule="zero-bubble-v")


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_several_blocks_a_chunk(recompute, schedule):
    assert_whole_agrees(models.mlp(8, 5, recompute=recompute), 2, 2, schedule=schedule)


@pytest.mark.parametrize("schedule", BOTH)
def test_data_axis(schedule):
    assert_whole_agrees(models.mlp(8, 3, size=8), 2, 2, 4, schedule)


@pytest.mark.parametrize("schedule", BOTH)
def test_fsdp(schedule):
    problem, mesh = models.mlp(8, 3, size=8), make_mesh(2, 2)
    own = chunked(problem, 2)
    partition = fsdp(mesh, own.params)
    stages = dataclasses.replace(own.stages, partition=partition)
    run = pipeline_value_and_grad(stages, own.loss, mesh, schedule)
    params = jax.device_put(own.params, param_shardings(mesh, own.params, partition))
    loss, grads = run(params, own.inputs, own.targets)
    assert all("data" in grad.sharding.spec for grad in jax.tree.leaves(grads.body))
    assert_same((loss, grads._replace(body=joined(grads.body))), reference_numbers(problem))


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("P", [1, 2, 4])
def test_stages_that_differ(P, schedule):
    problem = models.uneven((8, 8, 16, 4, 3, 5, 6, 7, 9)[: 2 * P + 1], 5)
    assert_whole_agrees(problem, 2, P, schedule=schedule)


def test_a_folded_table_of_ones_own():
    """With whole backwards, one microbatch after the other."""
    first, last = "F{0}.0 . . F{0}.1 B{0}.1 . . B{0}.0 ", ". F{0}.0 F{0}.1 . . B{0}.1 B{0}.0 . "
    rows = ["".join(row.format(i) for i in range(3)).split() for row in (first, last)]
    table = schedule_from_cells(rows, folded=True)
    assert not table.splits_backward
    assert_whole_agrees(models.mlp(4, 3), 2, 2, schedule=table)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("differ", [False, True])
def test_state_and_random_numbers(differ, schedule):
    """They do not depend on how blocks are cut."""
    plain, state, key = models.carrying(8, 5, size=16)
    expected = reference_value_and_grad(plain.stages, plain.loss)(
        plain.params, plain.inputs, plain.targets, state, key
    )
    own, state, _ = models.carrying(8, 5, size=16, stages=4 if differ else None)
    own, state = chunked(own, 2), state._replace(body=cut(state.body, 2))
    mesh = make_mesh(2)
    run = pipeline_value_and_grad(own.stages, own.loss, mesh, schedule)
    state = jax.device_put(state, param_shardings(mesh, state))
    actual = run(*place(own, mesh), state, key)
    wanted = reference_value_and_grad(own.stages, own.loss)(
        own.params, own.inputs, own.targets, state, key
    )
    assert_same(actual[:2], wanted[:2])
    assert_same((actual[0], actual[2]), (wanted[0], wanted[2]))
    if not differ:
        whole = actual[1]._replace(body=joined(actual[1].body))
        assert_same((actual[0], whole), expected[:2])
        moved = actual[2]._replace(body=joined(actual[2].body))
        assert_same((actual[0], moved), (expected[0], expected[2]))


@pytest.mark.parametrize(("V", "P", "M"), [(2, 1, 2), (2, 2, 5), (3, 2, 1), (2, 4, 6)])
def test_evaluate_and_predict(V, P, M):
    problem = models.mlp(V * P, M)
    own, mesh = chunked(problem, V), make_mesh(P)
    params, inputs, targets = place(own, mesh)
    loss = pipeline_evaluate(own.stages, own.loss, mesh)(params, inputs, targets)
    expected, _ = reference_numbers(problem)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    outputs = pipeline_predict(own.stages, mesh)(params, inputs)
    by_hand = np.mean((np.asarray(outputs) - np.asarray(targets)) ** 2)
    assert by_hand == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("layers", [pytest.param(8, marks=pytest.mark.slow), 7])
def test_a_gpt_cut_by_the_adapter(layers):
    """With seven layers the pieces differ; the plain form is the same either way."""
    config = GPTConfig(vocab_size=17, context=6, layers=layers, width=16, heads=2, tied=True)
    tokens = np.random.default_rng(0).integers(0, 17, (3, 2, 7), np.int32)
    inputs, targets = tokens[..., :-1], tokens[..., 1:]

    def make(num_chunks):
        return pipeline_from_nnx(
            lambda rngs: GPT(config, rngs=rngs),
            stem="embedding",
            body="blocks",
            head="head",
            num_stages=2,
            num_chunks=num_chunks,
            inputs=inputs[0],
        )

    found = {}
    for num_chunks, schedule in ((1, "1f1b"), (2, "interleaved"), (2, "zero-bubble-v")):
        model = make(num_chunks)
        params = model.init(nnx.Rngs(0))
        assert isinstance(params.body, Chunks) == (num_chunks > 1)
        loss, grads = pipeline_value_and_grad(
            model.stages, next_token_loss, make_mesh(2), schedule
        )(params, inputs, targets)
        found[schedule] = loss, model.to_plain(grads)
        again = model.from_plain(model.to_plain(params))
        assert jax.tree.structure(again) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, again, params)
    assert_same(found["interleaved"], found["1f1b"])
    assert_same(found["zero-bubble-v"], found["1f1b"])


def test_what_does_not_fit_is_refused():
    problem = models.mlp(8, 4)
    own, mesh = chunked(problem, 2), make_mesh(2)
    batch = problem.inputs, problem.targets
    with pytest.raises(
        ValueError, match="runs one chunk of the model on a stage, not num_chunks=2"
    ):
        pipeline_value_and_grad(own.stages, own.loss, mesh)(own.params, *batch)
    with pytest.raises(ValueError, match=r"stages.body has 1 chunks, params.body has 2"):
        pipeline_value_and_grad(problem.stages, own.loss, mesh, "interleaved")(own.params, *batch)
    uneven = own.params._replace(
        body=Chunks(own.params.body[0], jax.tree.map(lambda a: a[:2], own.params.body[1]))
    )
    with pytest.raises(ValueError, match=r"params.body\[0\] has 4, params.body\[1\] has 2"):
        pipeline_value_and_grad(own.stages, own.loss, mesh, "interleaved")(uneven, *batch)
    other = own.params._replace(
        body=Chunks(
            own.params.body[0], jax.tree.map(lambda a: a.astype(jnp.bfloat16), own.params.body[1])
        )
    )
    with pytest.raises(ValueError, match=r"params.body\[1\] is .*bfloat16.* must be alike"):
        pipeline_value_and_grad(own.stages, own.loss, mesh, "interleaved")(other, *batch)
    narrow = repeat_block(lambda p, x: jnp.sin(x.sum(-1, keepdims=True)) + 0 * x + p["b"])
    stages = dataclasses.replace(own.stages, body=Chunks(own.stages.body[0], narrow))
    with pytest.raises(ValueError, match=r"stages.body\[1\] and .* keep arrays of different"):
        pipeline_value_and_grad(stages, own.loss, mesh, "interleaved")(own.params, *batch)
    empty = own.params._replace(body=Chunks())
    with pytest.raises(ValueError, match="Chunks without any"):
        pipeline_value_and_grad(own.stages, own.loss, mesh, "interleaved")(empty, *batch)
    third = own.params._replace(body=cut(jax.tree.map(lambda a: a[:6], problem.params.body), 2))
    with pytest.raises(ValueError, match=r"6 blocks .* in 2 chunks do not divide over 2 stages"):
        pipeline_value_and_grad(own.stages, own.loss, mesh, "interleaved")(third, *batch)
    with pytest.raises(ValueError, match="num_chunks=0 must be at least 1"):
        pipeline_from_nnx(
            lambda rngs: GPT(GPTConfig(), rngs=rngs),
            stem="embedding",
            body="blocks",
            head="head",
            num_chunks=0,
        )
