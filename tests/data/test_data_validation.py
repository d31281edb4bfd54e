import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe.data import TokenStream, validation_windows


def text(num_tokens):
    return TokenStream([np.arange(num_tokens)])


@settings(deadline=None, max_examples=50)
@given(
    num_tokens=st.integers(9, 300),
    context=st.integers(1, 8),
    microbatch_size=st.integers(1, 5),
    max_windows=st.none() | st.integers(1, 50),
)
def test_windows_are_distinct_in_order_and_accounted_for(
    num_tokens, context, microbatch_size, max_windows
):
    total = (num_tokens - 1) // context
    chosen = min(total, max_windows or total)

    def choose():
        return validation_windows(
            text(num_tokens),
            context=context,
            microbatch_size=microbatch_size,
            max_windows=max_windows,
        )

    if chosen < microbatch_size:
        with pytest.raises(ValueError, match=f"microbatch_size={microbatch_size} is more than"):
            choose()
        return
    validation = choose()
    inputs, targets = validation.windows
    kept = chosen // microbatch_size * microbatch_size
    assert inputs.shape == targets.shape == (kept // microbatch_size, microbatch_size, context)
    assert inputs.dtype == targets.dtype == np.int32
    assert validation.num_dropped == total - kept
    np.testing.assert_array_equal(targets, inputs + 1)
    assert len(np.unique(targets)) == targets.size  # no token is scored twice
    starts = inputs[..., 0].ravel()
    assert (np.diff(starts) > 0).all()
    np.testing.assert_array_equal(starts % context, 0)
    np.testing.assert_array_equal(inputs, choose().windows.inputs)


def test_a_cap_keeps_windows_from_all_over():
    chosen = validation_windows(text(10_001), context=10, microbatch_size=4, max_windows=100)
    assert chosen.windows.inputs[..., 0].ravel().tolist() == list(range(0, 10_000, 100))
    assert chosen.num_dropped == 900


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"context": 100},
            "context=100 needs at least 101 tokens, but the validation text has 100",
        ),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"microbatch_size": 0}, "microbatch_size=0 must be at least 1"),
        ({"max_windows": 0}, "max_windows=0 must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        validation_windows(text(100), **{"context": 4, "microbatch_size": 2, **arguments})
