"""Real images for models to learn."""

import functools

import numpy as np
from sklearn.datasets import load_digits


@functools.cache
def digits(num_microbatches, size, dtype=np.float32):
    """Real images and labels, in microbatches."""
    data = load_digits()
    count = num_microbatches * size
    images = (data.images[:count] / 16).astype(dtype)
    labels = data.target[:count].astype(np.int32)
    return images.reshape(-1, size, 8, 8, 1), labels.reshape(-1, size)
