"""Text from a trained model, by the pipeline itself: no device need hold the whole model."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jpipe.mesh import DATA
from jpipe.pipeline import Params, Stages, pipeline_predict


def sample_tokens(
    stages: Stages,
    mesh: Mesh,
    params: Params,
    prompt: NDArray[np.int32],
    *,
    context: int,
    length: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> NDArray[np.int32]:
    """Go on with a prompt.

    Args:
        stages: a causal language model: int `[examples, context]` to logits.
        mesh: the mesh of the pipeline.
        params: the model's parameters.
        prompt: int32 `[1 to context]`.
        context: the most tokens the model sees.
        length: how many tokens to add.
        temperature: below 1 prefers likely tokens, above 0.
        seed: decides the choices.

    Returns:
        The tokens added, int32 `[length]`.
    """
    predict = pipeline_predict(stages, mesh)
    copies = mesh.shape.get(DATA, 1)  # every device of the data axis needs an example

    @jax.jit
    def choose(params: Params, window: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits = predict(params, jnp.broadcast_to(window, (1, copies, context)))[0, 0, last]
        return jax.random.categorical(key, logits.astype(jnp.float32) / temperature)

    tokens = list(prompt)
    keys = jax.device_put(jax.random.split(jax.random.key(seed), max(length, 1)))
    for i in range(length):
        window = np.zeros(context, np.int32)
        visible = tokens[-context:]
        window[: len(visible)] = visible
        tokens.append(int(choose(params, window, np.int32(len(visible) - 1), keys[i])))
    return np.array(tokens[len(prompt) :], np.int32)
