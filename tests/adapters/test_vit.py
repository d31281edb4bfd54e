"""A vision transformer with dropout in a pipeline, made of Flax's own layers."""

import jax
import numpy as np
import pytest
from adapters.images import digits
from flax import nnx
from parity.cases import assert_same, place
from parity.models import Problem

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import (
    ViT,
    ViTConfig,
    classification_loss,
)
from jpipe.pipeline import (
    pipeline_predict,
    pipeline_value_and_grad,
)
from jpipe.reference import reference_value_and_grad

VIT = ViTConfig(layers=4, width=16, heads=2, dropout=0.2)


def vit(**settings):
    return pipeline_from_nnx(
        lambda rngs: ViT(VIT, rngs=rngs), stem="patches", body="blocks", head="head", **settings
    )


@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        ((4, 1), "stage"),
        pytest.param((4, 1), "none", marks=pytest.mark.slow),
        pytest.param((2, 2), "none", marks=pytest.mark.slow),
    ],
)
def test_vit_with_dropout_equals_one_device(mesh, recompute):
    pipe = vit(recompute=recompute)
    params, key = pipe.init(nnx.Rngs(0)), jax.random.key(1)
    reference = reference_value_and_grad(pipe.stages, classification_loss, has_aux=True)
    (expected, _), grads = reference(params, *digits(3, 8), key=key)
    problem = Problem(pipe.stages, classification_loss, params, *digits(3, 8))
    mesh = make_mesh(*mesh)
    run = pipeline_value_and_grad(pipe.stages, classification_loss, mesh, has_aux=True)
    (loss, _), actual = run(*place(problem, mesh), key=key)
    assert_same((loss, actual), (expected, grads), 2e-6, floor=1e-3)


def test_vit_without_dropout_has_the_numbers_of_plain_flax():
    pipe = vit()
    params = pipe.init(nnx.Rngs(0))
    images, _ = digits(3, 8)
    outputs = pipeline_predict(pipe.eval_stages, make_mesh(4))(params, images)
    model = ViT(VIT, rngs=nnx.Rngs(0))
    model.eval()
    np.testing.assert_allclose(outputs[2], model(images[2]), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"patches draws random numbers.*pass key="):
        pipeline_predict(pipe.stages, make_mesh(4))(params, images)
