import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe.data import Batch, TokenStream, bigram, bigram_loss, load_tokens, validation_windows


def loss(train, inputs, targets, vocab_size, **kwargs):
    windows = Batch(np.atleast_2d(inputs).astype(np.int32), np.atleast_2d(targets).astype(np.int32))
    return bigram_loss(TokenStream([np.asarray(train)]), windows, vocab_size, **kwargs)


def test_by_hand():
    # Pairs 01 (twice), 10, 12, 20, of four kinds: n1 = 3, n2 = 1, D = 3/5. One extra id, 3.
    train = [0, 1, 0, 1, 2, 0]
    p_lower = np.array([2 + 1, 1 + 1, 1 + 1, 0 + 1]) / (4 + 4)
    p_after_1 = np.array([0.4, 0, 0.4, 0]) / 2 + 0.6 * 2 / 2 * p_lower
    for target, p in enumerate(p_after_1):
        assert loss(train, [1], [target], 4) == pytest.approx(-np.log(p))
    assert loss(train, [3], [1], 4) == pytest.approx(-np.log(p_lower[1]))  # 3 was never seen
    assert loss(train, [1, 3], [0, 1], 4) == pytest.approx(
        -np.log([p_after_1[0], p_lower[1]]).mean()
    )


@settings(deadline=None, max_examples=50)
@given(train=st.lists(st.integers(0, 5), min_size=2, max_size=60), dense=st.booleans())
def test_probabilities_sum_to_one(train, dense):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram, "_DENSE_VOCAB", 1024 if dense else 0)
        for before in range(7):
            p = [np.exp(-loss(train, [before], [after], 7)) for after in range(7)]
            assert min(p) > 0
            assert sum(p) == pytest.approx(1)


@settings(deadline=None, max_examples=50)
@given(
    train=st.lists(st.integers(0, 9), min_size=2, max_size=60),
    validation=st.lists(st.integers(0, 9), min_size=2, max_size=30),
    chunk=st.integers(1, 70),
)
def test_dense_sparse_and_chunked_counts_agree(train, validation, chunk):
    inputs, targets = validation[:-1], validation[1:]
    expected = loss(train, inputs, targets, 10)
    for dense_vocab in (0, 1024):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bigram, "_DENSE_VOCAB", dense_vocab)
            patch.setattr(bigram, "_CHUNK", chunk)
            assert loss(train, inputs, targets, 10) == pytest.approx(expected)


def test_a_large_vocabulary_needs_no_square_table():
    train = np.random.default_rng(0).integers(0, 2**17, 5000)
    assert loss(train, train[:-1], train[1:], 2**17) < np.log(2**17)


def test_limits():
    rng = np.random.default_rng(0)
    noise, more = rng.integers(0, 16, (2, 20_000))
    assert loss(noise, more[:-1], more[1:], 16) == pytest.approx(np.log(16), abs=0.02)
    cycle = np.arange(20_000) % 16
    assert loss(cycle, cycle[:-1], cycle[1:], 16) < 0.01


def test_of_a_long_text_a_spread_sample_is_counted(monkeypatch):
    monkeypatch.setattr(bigram, "_CHUNK", 100)
    # The second half is another language; a sample that stopped early would not know it.
    train = np.concatenate([np.zeros(5000, int), np.arange(5000) % 2])
    sampled = loss(train, [0, 1], [1, 0], 3, max_train_tokens=1000)
    assert sampled == pytest.approx(loss(train, [0, 1], [1, 0], 3), abs=0.05)
    assert sampled != loss(train, [0, 1], [1, 0], 3)


def test_on_the_default_text_it_beats_add_k_at_its_best():
    tokens = load_tokens()
    windows = validation_windows(tokens.validation, context=128, microbatch_size=4).windows
    ours = bigram_loss(tokens.train, windows, 256)
    train = tokens.train.read(0, len(tokens.train))
    counts = np.zeros((256, 256))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    inputs, targets = (part.ravel() for part in windows)
    add_k = [
        -np.log(((counts + k) / (counts + k).sum(1, keepdims=True))[inputs, targets]).mean()
        for k in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    ]
    assert min(add_k) - 0.05 < ours < min(add_k)


@pytest.mark.parametrize(
    ("train", "max_train_tokens", "message"),
    [([1], 10, "train has 1 tokens"), ([1, 2], 1, "max_train_tokens=1 must be at least 2")],
)
def test_bad_arguments(train, max_train_tokens, message):
    with pytest.raises(ValueError, match=message):
        loss(train, [1], [2], 3, max_train_tokens=max_train_tokens)
