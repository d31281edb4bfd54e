"""Training states to take snapshots of, and to compare bit by bit."""

import jax
import numpy as np
import optax
from parity import models

from jpipe.mesh import make_mesh
from jpipe.optim import dynamic_loss_scale, onebit_adam
from jpipe.pipeline import param_specs
from jpipe.snapshot.leaves import raw
from jpipe.train_step import init_train_state, make_train_step

PROBLEM = models.mlp(4, 5, size=4)


def bits(tree):
    return [np.asarray(raw(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def compressing(mesh, params):
    """All that an optimizer can keep: moments, error feedback, a loss scale."""
    adam = onebit_adam(1e-2, mesh, param_specs(mesh, params), freeze_step=2)
    return dynamic_loss_scale(adam)


def plain(mesh, params):
    return optax.adam(1e-2)


def trained(shape=(2, 2), steps=4, make=compressing, problem=PROBLEM):
    """A state after some steps, a fresh one, and a step."""
    mesh = make_mesh(*shape)
    optimizer = make(mesh, problem.params)

    def fresh():
        return init_train_state(lambda: problem.params, optimizer, mesh)

    run = make_train_step(problem.stages, problem.loss, optimizer, mesh)

    def step(state):
        state, metrics = run(state, problem.inputs, problem.targets)
        float(metrics.loss)  # waits
        return state

    state = fresh()
    for _ in range(steps):
        state = step(state)
    return state, fresh, step
