"""Wrong input is refused by name, with the remedy, before anything compiles."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from parity import models
from pipeline.small import (
    MICROBATCHES,
    SIZE,
    STAGES,
    changed,
    compilations,
    evaluate,
    predict,
    problem,
    train,
    with_params,
)

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    LossTerms,
    PerStage,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
    repeat_block,
)
from jpipe.schedule import make_schedule


def refused(call, *words):
    """The call raises ValueError with all the words, in order, and compiles nothing."""
    pattern = ".*".join(map(re.escape, words))
    with compilations() as durations, pytest.raises(ValueError, match=pattern):
        call()
    assert not durations


def test_compilations_are_seen():
    with compilations() as durations:
        train(problem(), make_mesh(STAGES))
    assert durations


# The mesh and the schedule: refused when the function is built.


@pytest.mark.parametrize(
    ("axes", "shape"),
    [(("data",), (4,)), (("pipe", "data"), (2, 2)), (("stage", "expert"), (2, 2))],
)
def test_mesh_with_other_axes(axes, shape):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), axes)
    found = problem()
    for build in (
        lambda: pipeline_value_and_grad(found.stages, found.loss, mesh),
        lambda: pipeline_evaluate(found.stages, found.loss, mesh),
        lambda: pipeline_predict(found.stages, mesh),
    ):
        refused(build, f"mesh has the axes {axes}", "'stage'", "'data'", "jpipe.mesh.make_mesh")


def test_unknown_schedule():
    found, mesh = problem(), make_mesh(STAGES)
    refused(
        lambda: pipeline_value_and_grad(found.stages, found.loss, mesh, "1f2b"),
        "schedule='1f2b' is unknown",
        "gpipe, 1f1b, 1f1b-overlap",
    )


def test_wrong_table():
    found, mesh = problem(), make_mesh(STAGES)
    right = make_schedule("1f1b", STAGES, MICROBATCHES)
    op = right.op.copy()
    op[0, 0] = 0
    wrong = dataclasses.replace(right, op=op, microbatch=np.where(op > 0, right.microbatch, -1))
    build = lambda table: pipeline_value_and_grad(found.stages, found.loss, mesh, table)  # noqa: E731
    build(right)
    refused(lambda: build(wrong), "schedule '1f1b'", "stage 0")


# The batch.


def test_targets_of_another_size_than_inputs():
    found = problem()
    wrong = found._replace(targets=found.targets[:, :2])
    for call in (train, evaluate):
        refused(
            lambda call=call: call(wrong, make_mesh(STAGES)),
            "targets has shape (3, 2, 3)",
            "inputs has shape (3, 4, 5)",
            "must be equal",
        )


def test_arrays_in_a_pytree_are_named():
    found = problem()
    wrong = found._replace(targets={"y": found.targets, "weight": found.targets[:2]})
    refused(
        lambda: train(wrong, make_mesh(STAGES)),
        "targets['weight'] has shape (2, 4, 3)",
        "inputs has shape (3, 4, 5)",
    )


@pytest.mark.parametrize("shape", [(), (3,), (0, 4, 5), (3, 0, 5)])
def test_array_that_is_no_batch(shape):
    wrong = problem()._replace(inputs=np.zeros(shape, np.float32))
    for call in (train, evaluate, predict):
        refused(
            lambda call=call: call(wrong, make_mesh(STAGES)),
            f"inputs has shape {shape}",
            "[microbatches, examples of a microbatch, ...]",
            "at least one of each",
        )


def test_empty_batch():
    wrong = problem()._replace(inputs={}, targets=())
    refused(lambda: train(wrong, make_mesh(STAGES)), "inputs and targets hold no arrays", "give")
    refused(lambda: predict(wrong, make_mesh(STAGES)), "inputs hold no arrays", "give")


def test_microbatch_that_does_not_divide_over_data():
    found = changed(problem(2), inputs=np.zeros((3, 5, 5)), targets=np.zeros((3, 5, 3)))
    for call in (train, evaluate, predict):
        refused(
            lambda call=call: call(found, make_mesh(2, 4)),
            "inputs has 5 examples a microbatch",
            "4 devices of the 'data' axis",
            "multiple of 4",
        )


def test_schedule_for_another_number_of_microbatches():
    found = problem()
    table = make_schedule("1f1b", STAGES, 8)
    refused(
        lambda: train(found, make_mesh(STAGES), table),
        "schedule '1f1b' is for 8 microbatches",
        "the data has 3",
        "num_microbatches=3",
        "or give the schedule's name",
    )


def test_schedule_for_another_number_of_stages():
    found = problem()
    table = make_schedule("gpipe", 2, MICROBATCHES)
    refused(
        lambda: train(found, make_mesh(STAGES), table),
        "schedule 'gpipe' is for 2 stages",
        "the mesh has 4",
        "num_stages=4",
    )


# The parameters.


@pytest.mark.parametrize("part", ["stem", "body", "head"])
def test_integer_parameters(part):
    found = problem()
    leaves = {**getattr(found.params, part), "n": np.zeros(STAGES, np.int32)}
    for call in (train, evaluate, predict):
        refused(
            lambda call=call: call(with_params(found, **{part: leaves}), make_mesh(STAGES)),
            f"params.{part}['n'] has dtype int32",
            "must be floating-point",
        )


def test_blocks_that_do_not_divide_over_the_stages():
    found = problem(6)
    for call in (train, evaluate, predict):
        refused(
            lambda call=call: call(found, make_mesh(STAGES)),
            "6 blocks (layers) do not divide over 4 stages",
            "with 6 use 1, 2, 3, 6 stages",
            "with 4 stages use 4 or 8 layers",
        )


def test_fewer_blocks_than_stages():
    found = problem(2)
    refused(
        lambda: train(found, make_mesh(STAGES)),
        "2 blocks (layers) do not divide over 4 stages",
        "use 1, 2 stages",
        "use 4 layers",
    )


def test_different_numbers_of_blocks():
    found = problem()
    wrong = with_params(found, body={**found.params.body, "w": np.zeros((8, 8, 8), np.float32)})
    refused(
        lambda: train(wrong, make_mesh(STAGES)),
        "the body must stack the same number of blocks",
        "params.body['b'] has 4",
        "params.body['w'] has 8",
    )


def test_body_without_blocks():
    found = problem()
    scalar = with_params(found, body={**found.params.body, "s": np.float32(1)})
    refused(
        lambda: train(scalar, make_mesh(STAGES)),
        "params.body['s'] is a scalar",
        "its first dim must hold the blocks",
    )
    refused(
        lambda: train(with_params(found, body={}), make_mesh(STAGES)),
        "params.body holds no arrays",
        "needs blocks",
    )


# The model.


def test_integers_between_stages():
    wrong = changed(problem(), stem=lambda p, x: {"tokens": jnp.zeros((SIZE, 8), jnp.int32)})
    for call in (train, evaluate, predict):
        refused(
            lambda call=call: call(wrong, make_mesh(STAGES)),
            "the stem's output['tokens'] has dtype int32",
            "must be floating-point",
        )


@pytest.mark.parametrize(
    ("body", "made"),
    [
        (lambda p, x: jnp.pad(x, ((0, 0), (0, 1))), "float32[4, 9]"),
        (lambda p, x: x.astype(jnp.bfloat16), "bfloat16[4, 8]"),
        (lambda p, x: (x, x), "('float32[4, 8]', 'float32[4, 8]')"),
    ],
)
def test_body_that_does_not_fit_itself(body, made):
    found = problem()
    for call in (train, evaluate, predict):
        for num_stages, after in ((4, "the input of stage 1"), (1, "the input of the head")):
            refused(
                lambda call=call, n=num_stages: call(changed(found, body=body), make_mesh(n)),
                f"the output of stage 0 does not fit {after}",
                f"makes {made} of float32[4, 8]",
                "must keep structure, shapes and dtypes",
            )


@pytest.mark.parametrize(
    ("loss", "returned"),
    [
        (lambda y, t: (y - t) ** 2, "float32[4, 3]"),
        (lambda y, t: jnp.sum(y > t), "int32[]"),
        (lambda y, t: (jnp.mean(y), jnp.mean(t)), "('float32[]', 'float32[]')"),
        (lambda y, t: None, "None"),
    ],
)
def test_loss_that_is_no_scalar(loss, returned):
    found = problem()
    for call in (train, evaluate):
        refused(
            lambda call=call: call(found._replace(loss=loss), make_mesh(STAGES)),
            f"loss returned {returned}",
            "one floating-point scalar",
            "mean over the microbatch",
        )


def test_aux_that_nobody_takes():
    loss = lambda y, t: LossTerms(jnp.sum((y - t) ** 2), jnp.float32(t.size), jnp.sum(y > t))  # noqa: E731
    found = problem()._replace(loss=loss)
    for call in (train, evaluate):
        refused(lambda call=call: call(found, make_mesh(STAGES)), "LossTerms", "has_aux=True")


@pytest.mark.parametrize(
    "terms",
    [
        lambda y, t: LossTerms((y - t) ** 2, 1.0),
        lambda y, t: LossTerms(jnp.sum(y), jnp.ones_like(t)),
        lambda y, t: LossTerms(jnp.sum(y > t), 1.0),
    ],
)
def test_loss_terms_that_are_no_scalars(terms):
    found = problem()._replace(loss=terms)
    for call in (train, evaluate):
        refused(
            lambda call=call: call(found, make_mesh(STAGES)),
            "loss returned LossTerms(total=",
            "LossTerms with a scalar total and weight",
        )


def test_stages_that_differ_in_number_from_their_parameters():
    found = models.uneven((8, 8, 8, 8, 8), MICROBATCHES)
    wrong = changed(found, body=PerStage(*list(found.stages.body)[:3]))
    for call in (train, evaluate, predict):
        refused(
            lambda call=call: call(wrong, make_mesh(STAGES)),
            "stages.body has 3 functions",
            "params.body parameters for 4",
        )


def test_a_stage_that_makes_integers():
    found = models.uneven((8, 8, 8, 8, 8), MICROBATCHES)
    body = list(found.stages.body)
    body[2] = lambda p, x: jnp.argsort(x)
    refused(
        lambda: train(changed(found, body=PerStage(*body)), make_mesh(STAGES)),
        "stage 2's output has dtype int32",
        "must be floating-point",
    )


def test_unknown_recompute():
    refused(
        lambda: repeat_block(lambda p, x: x, "all"),
        "recompute='all' is unknown",
        "none, block, stage",
    )
