"""What every contender computes: sizes, parameters and tokens, all made once and read from a file.

Shapes: V vocabulary, S tokens, D width, L blocks, M microbatches, B examples of a microbatch.
"""

import dataclasses
import pathlib

import numpy as np

STAGES = 4
Params = dict[str, dict[str, np.ndarray]]
"""Arrays of `stem`, `body` (blocks stacked in the first dim) and `head` by name."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A GPT and the size of a microbatch."""

    width: int
    heads: int
    layers: int = 8
    context: int = 128
    vocab: int = 256
    microbatch: int = 2


PROBLEMS = {
    "gpt": Problem(width=256, heads=8),
    # Next to no arithmetic; and even less, where what a schedule costs in itself is all there is.
    "tiny": Problem(width=8, heads=2),
    "bare": Problem(width=8, heads=1, context=8),
}


def save_problem(folder: pathlib.Path, name: str, max_microbatches: int, seed: int = 0) -> None:
    """Make parameters and tokens and write them to `folder`."""
    problem, rng = PROBLEMS[name], np.random.default_rng(seed)
    D, L, S, V = problem.width, problem.layers, problem.context, problem.vocab

    def normal(*shape: int, scale: float = 0.02) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    onto_residual = 0.02 * (2 * L) ** -0.5
    params = {
        "stem": {"token": normal(V, D), "position": normal(S, D)},
        "body": {
            "norm1_scale": ones(L, D),
            "norm1_bias": zeros(L, D),
            "qkv_w": normal(L, D, 3 * D),
            "qkv_b": zeros(L, 3 * D),
            "out_w": normal(L, D, D, scale=onto_residual),
            "out_b": zeros(L, D),
            "norm2_scale": ones(L, D),
            "norm2_bias": zeros(L, D),
            "up_w": normal(L, D, 4 * D),
            "up_b": zeros(L, 4 * D),
            "down_w": normal(L, 4 * D, D, scale=onto_residual),
            "down_b": zeros(L, D),
        },
        "head": {"norm_scale": ones(D), "norm_bias": zeros(D), "project_w": normal(D, V)},
    }
    flat = {f"{part}.{key}": a for part, arrays in params.items() for key, a in arrays.items()}
    shape = (max_microbatches, problem.microbatch, S + 1)
    tokens = rng.integers(0, V, shape, dtype=np.int32)
    np.savez(folder / f"{name}.npz", tokens=tokens, **flat)


def load_problem(
    folder: pathlib.Path, name: str, num_microbatches: int
) -> tuple[Problem, Params, np.ndarray, np.ndarray]:
    """Read what `save_problem` wrote.

    Returns:
        The problem, its parameters, and int32 inputs and targets `[M, B, S]`.
    """
    params: Params = {"stem": {}, "body": {}, "head": {}}
    with np.load(folder / f"{name}.npz") as arrays:
        for key in arrays.files:
            if key != "tokens":
                part, leaf = key.split(".")
                params[part][leaf] = arrays[key]
        tokens = arrays["tokens"][:num_microbatches]
    return PROBLEMS[name], params, tokens[..., :-1].copy(), tokens[..., 1:].copy()
