"""The task of classifying images, by a ResNet."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jpipe.data import ImageBatches, Labelled, load_images
from jpipe.models import ResNet, ResNetConfig, classification_loss
from jpipe.pipeline import Loss
from jpipe.precision import POLICIES
from jpipe.train.options import RESNETS, TrainOptions
from jpipe.train.task import Task, Yardstick

_SMALL = 32  # pixels
_LINEAR_STEPS = 200


class VisionTask(Task):
    """See `Task`.

    Args:
        options: of the run.
        microbatch_size: examples of a microbatch, over all devices.

    Raises:
        ValueError: if the options do not fit each other or the images.
    """

    stem = "stem"
    loss: Loss = staticmethod(classification_loss)
    item = "image"
    items_per_example = 1

    def __init__(self, options: TrainOptions, microbatch_size: int) -> None:
        self.options = options
        self._data = load_images(options.data)
        shape = self._data.train.images.shape[1:]
        self.config = ResNetConfig(
            depth=RESNETS[options.model],
            classes=self._data.classes,
            channels=shape[-1],
            width=options.width,
            small_images=max(shape[:2]) <= _SMALL,
            policy=POLICIES[options.precision],
        )
        self.batches = ImageBatches(
            self._data.train, microbatch_size=microbatch_size, seed=options.seed
        )
        self.validation: tuple[Any, Any] = _in_microbatches(self._data.validation, microbatch_size)
        self.inputs = jax.ShapeDtypeStruct((microbatch_size, *shape), np.float32)
        self.targets = jax.ShapeDtypeStruct((microbatch_size,), np.int32)

    def facts(self) -> dict[str, str]:
        """What to say of model and data."""
        config = self.config
        sizes = f"{config.depth} layers, width {config.width}, {config.classes} classes"
        return {"model": sizes, "data": self._data.description}

    def yardstick(self) -> Yardstick:
        """Softmax regression on the pixels."""
        train, validation = self._data.train, self.validation

        def loss(params: Any, images: Any, labels: Any) -> jax.Array:
            flat = images.reshape(-1, params["w"].shape[0])
            terms = classification_loss(flat @ params["w"] + params["b"], labels.ravel())
            return terms.total / terms.weight

        @jax.jit
        def fit(images: Any, labels: Any) -> Any:
            pixels, classes = images[0].size, self._data.classes
            params = {"w": jnp.zeros((pixels, classes)), "b": jnp.zeros(classes)}
            optimizer = optax.adam(0.05)

            def step(carry: Any, _: None) -> tuple[Any, None]:
                params, state = carry
                grads = jax.grad(loss)(params, images, labels)
                updates, state = optimizer.update(grads, state)
                return (optax.apply_updates(params, updates), state), None

            start = (params, optimizer.init(params))
            (params, _), _ = jax.lax.scan(step, start, length=_LINEAR_STEPS)
            return params

        found = loss(fit(*train), *(jnp.asarray(a) for a in validation))
        return Yardstick("linear model", float(found))

    def make_model(self, rngs: nnx.Rngs) -> ResNet:
        """The model itself."""
        return ResNet(self.config, rngs=rngs)


def _in_microbatches(data: Labelled, size: int) -> tuple[Any, Any]:
    count = len(data.labels) // size
    if not count:
        raise ValueError(
            f"microbatches of {size} examples are more than the {len(data.labels)} images held "
            "out; use a smaller --batch-size, or more --microbatches"
        )
    images, labels = (a[: count * size].reshape(count, size, *a.shape[1:]) for a in data)
    return images, labels
