"""The yardstick: how well a token is predicted from the one before it, by counting.

A language model that is no better than this has learnt nothing from its context. The model is
interpolated Kneser-Ney of order two (Kneser & Ney 1995; Chen & Goodman 1999), among
the best ways to count bigrams: with c(a, b) pairs counted and D taken off each,

    p(b | a) = max(c(a, b) - D, 0) / c(a)  +  D N(a, .) / c(a)  p(b)
    p(b)     = (N(., b) + 1) / (N(., .) + V)

where N counts different pairs, not occurrences. Its one constant is estimated from the counts of
the training text, D = n1 / (n1 + 2 n2) with n1 pairs seen once and n2 twice (Ney, Essen & Kneser
1994). We add one to N(., b), so that a token never seen costs a finite loss.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpipe.data.stream import TokenStream
from jpipe.data.windows import Batch

_DENSE_VOCAB = 1024  # below it a table of all pairs takes 8 MiB at most
_CHUNK = 2**20  # tokens counted at once


def bigram_loss(
    train: TokenStream, validation: Batch, vocab_size: int, *, max_train_tokens: int = 2**24
) -> float:
    """Loss of a bigram model, fitted on the training text and scored as the GPT is.

    Args:
        train: the training text. Of one longer than `max_train_tokens` that many are counted, in
            chunks of a million spread over it.
        validation: the examples to predict, int `[..., context]`.
        vocab_size: V.
        max_train_tokens: counting a token takes up to 0.2 us.

    Returns:
        Mean of `-ln p(target | input)` over all targets, in nats per token.

    Raises:
        ValueError: if there are fewer than two training tokens, or `max_train_tokens` is below 2.
    """
    if max_train_tokens < 2:
        raise ValueError(f"max_train_tokens={max_train_tokens} must be at least 2")
    if len(train) < 2:
        raise ValueError(f"train has {len(train)} tokens and no pair to count: give more data")
    pairs = _count_pairs(train, vocab_size, max_train_tokens)
    before, after = np.divmod(pairs.codes, vocab_size)
    occurrences = np.bincount(before, weights=pairs.counts, minlength=vocab_size)
    continuations = np.bincount(before, minlength=vocab_size)
    predecessors = np.bincount(after, minlength=vocab_size)
    discount = _discount(pairs.counts)

    a, b = (tokens.reshape(-1).astype(np.int64) for tokens in validation)
    lower = (predecessors[b] + 1) / (len(pairs.codes) + vocab_size)
    seen = np.maximum(occurrences[a], 1)
    kept = np.maximum(pairs.counts_of(a * vocab_size + b) - discount, 0) / seen
    freed = np.where(occurrences[a] > 0, discount * continuations[a] / seen, 1)
    return float(-np.log(kept + freed * lower).mean())


class _Pairs(NamedTuple):
    """How often each pair occurs; a code is `before * vocab_size + after`, and they ascend."""

    codes: NDArray[np.int64]
    counts: NDArray[np.int64]

    def counts_of(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        at = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return np.where(self.codes[at] == codes, self.counts[at], 0)


def _count_pairs(train: TokenStream, vocab_size: int, max_tokens: int) -> _Pairs:
    """Count neighbours in the text, sparsely if V^2 is large."""
    dense = vocab_size <= _DENSE_VOCAB
    table = np.zeros(vocab_size**2 if dense else 0, np.int64)
    chunks: list[_Pairs] = []
    size = min(_CHUNK, max_tokens)
    num_chunks = -(-len(train) // size)
    counted = min(num_chunks, -(-max_tokens // size))
    for i in range(counted):
        start = i * num_chunks // counted * size
        # One token more than the chunk: the last of it also has a successor.
        tokens = train.read(start, start + size + 1).astype(np.int64)
        codes = tokens[:-1] * vocab_size + tokens[1:]
        if dense:
            table += np.bincount(codes, minlength=len(table))
        else:
            chunks.append(_Pairs(*np.unique(codes, return_counts=True)))
    if dense:
        codes = np.flatnonzero(table)
        return _Pairs(codes, table[codes])
    codes, place = np.unique(np.concatenate([c.codes for c in chunks]), return_inverse=True)
    counts = np.bincount(place, weights=np.concatenate([c.counts for c in chunks]))
    return _Pairs(codes, counts.astype(np.int64))


def _discount(counts: NDArray[np.int64]) -> float:
    """D in (0, 1]; a half where no pair was seen once, as in a small alphabet."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5
