"""Parameters divided over the axes `model` and `data`: tensor parallelism and FSDP."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from parity import models
from parity.cases import TOLERANCE, WAYS, assert_same, reference_numbers

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.pipeline import (
    Params,
    batch_sharding,
    fsdp,
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
)
from jpipe.reference import reference_value_and_grad
from jpipe.train_step import init_train_state, make_train_step

MESHES = [(4, 2, 1), (2, 2, 2), (1, 2, 2), (8, 1, 1), (1, 1, 1), (2, 1, 4)]


def place(problem, mesh, partition):
    shardings = param_shardings(mesh, problem.params, partition)
    batch = jax.device_put((problem.inputs, problem.targets), batch_sharding(mesh))
    return jax.device_put(problem.params, shardings), *batch


def gpt(num_blocks, num_microbatches, tied=False, dtype=jnp.float32):
    config = GPTConfig(vocab_size=16, context=8, layers=num_blocks, width=16, heads=4, tied=tied)
    pipe = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs), stem="embedding", body="blocks", head="head"
    )
    tokens = np.random.default_rng(0).integers(0, 16, (num_microbatches, 4, 9))
    params = jax.tree.map(lambda a: a.astype(dtype), pipe.init(nnx.Rngs(0)))
    return models.Problem(pipe.stages, next_token_loss, params, tokens[..., :-1], tokens[..., 1:])


def numbers(problem, mesh, schedule="1f1b"):
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, schedule)
    return run(*place(problem, mesh, problem.stages.partition))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("tied", [False, True])
def test_annotated_gpt_equals_one_device(mesh, tied):
    problem = gpt(8, 3, tied)
    assert_same(numbers(problem, make_mesh(*mesh)), reference_numbers(problem))


@pytest.mark.parametrize("schedule", WAYS)
def test_every_schedule_with_three_axes(schedule):
    problem = gpt(2, 4)
    assert_same(numbers(problem, make_mesh(2, 2, 2), schedule), reference_numbers(problem))


def test_bfloat16_with_three_axes():
    """A sum in bfloat16 over an axis that XLA divides would end the process."""
    problem = gpt(2, 4, dtype=jnp.bfloat16)
    actual = numbers(problem, make_mesh(2, 2, 2))
    assert_same(actual, reference_numbers(problem), TOLERANCE["bfloat16"])


def with_fsdp(problem, mesh):
    partition = fsdp(mesh, problem.params)
    return problem._replace(stages=dataclasses.replace(problem.stages, partition=partition))


@pytest.mark.parametrize("mesh", [(4, 2, 1), (2, 4, 1), (1, 8, 1)])
def test_fsdp_equals_one_device(mesh):
    mesh = make_mesh(*mesh)
    problem = with_fsdp(models.mlp(8, 5, size=8), mesh)
    actual = numbers(problem, mesh)
    assert_same(actual, reference_numbers(problem))
    for grad in jax.tree.leaves(actual[1].body["w"]):
        assert "data" in grad.sharding.spec


def test_fsdp_of_stages_that_differ():
    mesh = make_mesh(2, 4)
    problem = with_fsdp(models.uneven((6, 7, 8), 4, size=8), mesh)
    assert_same(numbers(problem, mesh), reference_numbers(problem))


@pytest.mark.parametrize("stages", [None, 2])
def test_state_and_random_numbers_with_three_axes(stages):
    problem, state, key = models.carrying(4, 5, size=8, stages=stages)
    run = reference_value_and_grad(problem.stages, problem.loss)
    loss, grads, updated = run(problem.params, problem.inputs, problem.targets, state, key)
    mesh = make_mesh(2, 2, 2)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh)
    got = run(*place(problem, mesh, None), state, key)
    assert_same(got[:2], (loss, grads))
    assert_same((loss, got[2]), (loss, updated))


def test_each_device_holds_its_part_of_parameters_and_optimizer_state():
    problem, mesh = gpt(4, 4), make_mesh(2, 2, 2)
    optimizer = optax.adamw(1e-3)
    partition = problem.stages.partition
    state = init_train_state(lambda: problem.params, optimizer, mesh, partition=partition)
    kernel = state.params.body["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec("stage", None, "model")
    moment = state.opt_state[0].mu.body["mlp"]["up"]["kernel"]
    assert moment.sharding == kernel.sharding
    step = make_train_step(problem.stages, problem.loss, optimizer, mesh)
    compiled = step.lower(state, problem.inputs, problem.targets).compile()
    state, metrics = compiled(state, *jax.device_put(problem[3:], batch_sharding(mesh)))
    assert state.params.body["mlp"]["up"]["kernel"].sharding == kernel.sharding
    _, grads = reference_numbers(problem)
    assert float(metrics.grad_norm) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)


def test_evaluation_with_three_axes():
    problem, mesh = gpt(4, 3), make_mesh(2, 2, 2)
    params, inputs, targets = place(problem, mesh, problem.stages.partition)
    loss = pipeline_evaluate(problem.stages, problem.loss, mesh)(params, inputs, targets)
    expected, _ = reference_numbers(problem)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    outputs = pipeline_predict(problem.stages, mesh)(params, inputs)
    by_hand = np.mean([next_token_loss(y, t) for y, t in zip(outputs, targets, strict=True)])
    assert float(by_hand) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (PartitionSpec(None, None, "model"), "8 does not divide over 3 devices"),
        (PartitionSpec(None, "stage"), "jpipe lays out itself"),
        (PartitionSpec(None, None, None, "model"), "has more dims"),
    ],
)
def test_bad_annotations_are_refused(spec, words):
    problem, mesh = models.mlp(2, 2), make_mesh(1, 2, 3)
    whole = jax.tree.map(lambda _: PartitionSpec(), problem.params)
    partition = Params(whole.stem, {"w": spec, "b": PartitionSpec()}, whole.head)
    with pytest.raises(ValueError, match=words):
        param_shardings(mesh, problem.params, partition)


def test_one_dim_over_two_axes():
    """Of which a mesh may have one, both or none."""
    problem = models.mlp(2, 3, size=4)
    spec = PartitionSpec(None, None, ("data", "model"))
    whole = jax.tree.map(lambda _: PartitionSpec(), problem.params)
    partition = Params(whole.stem, {"w": spec, "b": PartitionSpec()}, whole.head)
    stages = dataclasses.replace(problem.stages, partition=partition)
    problem = problem._replace(stages=stages)
    expected = reference_numbers(problem)
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data"))
    for mesh in (make_mesh(2, 2, 2), make_mesh(2), two):
        assert_same(numbers(problem, mesh), expected)
    assert not any(jax.tree.leaves(fsdp(make_mesh(2), problem.params)))
