"""Labelled images to learn to classify."""

import dataclasses
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpipe.data.shuffled import ShuffledBatches

_VALIDATION_SHARE = 10  # one image in ten is held out


class Labelled(NamedTuple):
    """Images and what they show.

    Attributes:
        images: float32 `[N, height, width, channels]`, between 0 and 1.
        labels: int32 `[N]`.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int32]


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Images in two parts that share none.

    Attributes:
        train: what to learn from.
        validation: what to be judged on.
        classes: number of classes; labels lie below it.
        description: what the images are and how many, in one line.
    """

    train: Labelled
    validation: Labelled
    classes: int
    description: str


def load_images(paths: Sequence[str | Path] = ()) -> Images:
    """Read images and hold out every tenth.

    Args:
        paths: one `.npz` file with `images`, `[N, height, width]` with or without channels behind,
            uint8 or floats between 0 and 1, and `labels`, integers `[N]` from 0 up. Without, the
            handwritten digits of scikit-learn: 1,797 of 8 x 8 pixels.

    Raises:
        ValueError: if the file is missing, unreadable or malformed, or scikit-learn is needed and
            not there.
    """
    if len(paths) > 1:
        raise ValueError(f"data={' '.join(map(str, paths))}: give one .npz file of images")
    images, labels, name = _read(Path(paths[0])) if paths else _digits()
    held_out = np.arange(len(labels)) % _VALIDATION_SHARE == _VALIDATION_SHARE - 1
    if not held_out.any():
        raise ValueError(
            f"data={name} holds {len(labels)} images; to hold out one in ten it takes at least 10"
        )
    train, validation = (Labelled(images[mask], labels[mask]) for mask in (~held_out, held_out))
    shape = " x ".join(map(str, images.shape[1:3]))
    return Images(
        train=train,
        validation=validation,
        classes=int(labels.max()) + 1,
        description=f"{name}: {len(train.labels):,} images to train, "
        f"{len(validation.labels):,} to validate, of {shape} pixels",
    )


class ImageBatches(ShuffledBatches):
    """Endless training batches of images, reshuffled every epoch.

    Args:
        train: the images.
        microbatch_size: B.
        seed: decides the order.
    """

    def __init__(self, train: Labelled, *, microbatch_size: int, seed: int = 0) -> None:
        crc = zlib.crc32(train.labels.tobytes(), zlib.crc32(train.images.tobytes()))
        super().__init__(
            _Pairs(train),
            microbatch_size=microbatch_size,
            seed=seed,
            identity={"seed": seed, "data_crc32": crc},
        )

    def next_step(self, num_microbatches: int, rows: range | None = None) -> Labelled:
        """Draw the microbatches of one step: `[M, B, ...]`, or these rows of the B."""
        return Labelled(*super().next_step(num_microbatches, rows))


class _Pairs:
    def __init__(self, data: Labelled) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._data.images[index], self._data.labels[index]


def _digits() -> tuple[NDArray[np.float32], NDArray[np.int32], str]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "without data the images are the digits of scikit-learn, which is not installed: "
            "pip install 'jpipe[images]', or give an .npz file of your own"
        ) from error
    digits: Any = load_digits()
    images = np.asarray(digits.images / 16, np.float32)[..., None]
    return images, np.asarray(digits.target, np.int32), "handwritten digits of scikit-learn"


def _read(path: Path) -> tuple[NDArray[np.float32], NDArray[np.int32], str]:
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"data={path} cannot be read ({error}): give an .npz file with images and labels"
        ) from error
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or labels.shape != images.shape[:1] or 0 in images.shape:
        raise ValueError(
            f"data={path} holds images {images.shape} and labels {labels.shape}: they must be "
            "[N, height, width, channels] and [N]"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise ValueError(f"data={path}: labels must be integers from 0 up")
    if images.dtype == np.uint8:
        images = images / np.float32(255)
    images = np.asarray(images, np.float32)
    if not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= 1):
        raise ValueError(f"data={path}: images must be uint8, or floats between 0 and 1")
    return images, labels.astype(np.int32), str(path)
