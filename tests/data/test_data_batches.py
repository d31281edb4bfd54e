import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe.data import TokenBatches, TokenStream


def text(num_tokens):
    """Tokens that say where they stand."""
    return TokenStream([np.arange(num_tokens)])


def examples(batches, num_examples, num_microbatches):
    """The first examples, whatever the batching: the start of each window."""
    starts = []
    while len(starts) < num_examples:
        starts += batches.next_step(num_microbatches).inputs[..., 0].ravel().tolist()
    return starts[:num_examples]


@settings(deadline=None, max_examples=25)
@given(
    num_tokens=st.integers(60, 200),  # grain's shuffle is slow on a handful
    context=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    batching=st.tuples(*[st.integers(1, 7)] * 4),
)
def test_batching_only_cuts_the_sequence(num_tokens, context, seed, batching):
    b1, m1, b2, m2 = batching
    one = TokenBatches(text(num_tokens), context=context, microbatch_size=b1, seed=seed)
    other = TokenBatches(text(num_tokens), context=context, microbatch_size=b2, seed=seed)
    num_windows = (num_tokens - 1) // context
    assert one.num_windows == num_windows
    drawn = examples(one, 3 * num_windows, m1)
    assert drawn == examples(other, 3 * num_windows, m2)
    for epoch in range(3):
        seen = sorted(drawn[epoch * num_windows :][:num_windows])
        assert seen == list(range(0, num_windows * context, context))


def test_epochs_and_seeds_are_shuffled_differently():
    orders = {
        tuple(examples(batches, 40, 5)[i : i + 20])
        for seed in range(3)
        for batches in [TokenBatches(text(101), context=5, microbatch_size=2, seed=seed)]
        for i in (0, 20)
    }
    assert len(orders) == 6
    assert all(list(order) != sorted(order) for order in orders)


def test_shape_and_content_of_a_step():
    step = TokenBatches(text(1000), context=7, microbatch_size=3).next_step(4)
    assert step.inputs.shape == step.targets.shape == (4, 3, 7)
    assert step.inputs.dtype == step.targets.dtype == np.int32
    np.testing.assert_array_equal(step.targets, step.inputs + 1)
    np.testing.assert_array_equal(np.diff(step.inputs), 1)


def test_every_token_but_the_first_is_a_target_once_an_epoch():
    batches = TokenBatches(text(61), context=6, microbatch_size=5)
    targets = batches.next_step(2).targets
    assert sorted(targets.ravel()) == list(range(1, 61))


@settings(deadline=None, max_examples=25)
@given(
    num_tokens=st.integers(60, 100),
    microbatch_size=st.integers(1, 4),
    before=st.integers(0, 40),
    after=st.integers(1, 40),
)
def test_a_run_goes_on_where_it_stopped(num_tokens, microbatch_size, before, after):
    def fresh():
        return TokenBatches(text(num_tokens), context=3, microbatch_size=microbatch_size, seed=5)

    straight = fresh()
    for _ in range(before):
        straight.next_step(1)
    state = json.loads(json.dumps(straight.get_state()))
    assert state["next_index"] == before
    resumed = fresh()
    resumed.next_step(3)  # what it drew before is forgotten
    resumed.set_state(state)
    assert resumed.get_state() == straight.get_state()
    for ours, theirs in zip(resumed.next_step(after), straight.next_step(after), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(deadline=None, max_examples=25)
@given(old=st.integers(1, 6), new=st.integers(1, 6), drawn=st.integers(0, 12))
def test_a_run_goes_on_with_another_microbatch_size(old, new, drawn):
    first = TokenBatches(text(50), context=1, microbatch_size=old)
    head = first.next_step(drawn).inputs[..., 0].ravel().tolist() if drawn else []
    second = TokenBatches(text(50), context=1, microbatch_size=new)
    if drawn * old % new:
        with pytest.raises(ValueError, match=f"microbatch_size={new} does not divide"):
            second.set_state(first.get_state())
        return
    second.set_state(first.get_state())
    straight = examples(TokenBatches(text(50), context=1, microbatch_size=1), len(head) + 60, 1)
    assert head + examples(second, 60, 2) == straight


@pytest.mark.parametrize("name", ["context", "seed", "data_crc32"])
def test_the_cursor_of_another_run_is_refused(name):
    other = {
        "context": TokenBatches(text(100), context=4, microbatch_size=2),
        "seed": TokenBatches(text(100), context=3, microbatch_size=2, seed=1),
        "data_crc32": TokenBatches(text(104), context=3, microbatch_size=2),
    }
    batches = TokenBatches(text(100), context=3, microbatch_size=2)
    with pytest.raises(ValueError, match=f"{name}=.*resume with the data and settings"):
        batches.set_state(other[name].get_state())
    assert batches.get_state()["next_index"] == 0


def test_an_edited_text_is_noticed():
    tokens = np.arange(100_000)
    state = TokenBatches(TokenStream([tokens]), context=8, microbatch_size=1).get_state()
    shifted = TokenBatches(TokenStream([np.roll(tokens, 1)]), context=8, microbatch_size=1)
    with pytest.raises(ValueError, match="data_crc32="):
        shifted.set_state(state)


def test_a_state_without_a_cursor_is_refused():
    with pytest.raises(ValueError, match=r"state lacks \['context', .*'seed'\]"):
        TokenBatches(text(9), context=3, microbatch_size=2).set_state({"next_index": 3})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 0}, "context=0 must be at least 1"),
        ({"context": 100}, "context=100 needs at least 101 tokens, but the training text has 100"),
        ({"microbatch_size": 0}, "microbatch_size=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must not be negative"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenBatches(text(100), **{"context": 4, "microbatch_size": 2, **arguments})


def test_no_microbatches():
    with pytest.raises(ValueError, match="num_microbatches=0 must be at least 1"):
        TokenBatches(text(100), context=4, microbatch_size=2).next_step(0)


def test_a_single_window_is_repeated():
    inputs = TokenBatches(text(5), context=4, microbatch_size=3).next_step(2).inputs
    np.testing.assert_array_equal(inputs, np.broadcast_to(np.arange(4), (2, 3, 4)))


def test_no_thread_is_started():
    before = threading.active_count()
    batches = TokenBatches(text(1000), context=4, microbatch_size=2)
    batches.next_step(10)
    assert threading.active_count() == before


def test_processes_read_one_batch_together():
    whole = TokenBatches(text(500), context=3, microbatch_size=6).next_step(4)
    parts = [
        TokenBatches(text(500), context=3, microbatch_size=6).next_step(4, rows)
        for rows in (range(2), range(2, 6))
    ]
    for k in range(2):
        np.testing.assert_array_equal(np.concatenate([p[k] for p in parts], 1), whole[k])
