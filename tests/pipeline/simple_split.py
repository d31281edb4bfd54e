"""The split gradient of a function of parameters and input alone."""

from typing import NamedTuple

from jpipe.pipeline import residuals


class Simple(NamedTuple):
    kept: list
    forward: object
    backward: object


def split_gradient(function, params, x):
    split = residuals.split_gradient(lambda p, _, x, __: (function(p, x), ()), params, (), x, ())

    def forward(params, x):
        y, _, kept = split.forward(params, (), x, ())
        return y, kept

    return Simple(split.kept, forward, lambda p, kept, dy: split.backward(p, (), kept, dy))
