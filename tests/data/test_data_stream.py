import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe.data import TokenStream

PARTS = st.lists(st.lists(st.integers(0, 65535), max_size=6), min_size=1, max_size=5)
DTYPES = st.sampled_from(["u2", "<u4", ">i4", "i8", "u8"])


@settings(deadline=None, max_examples=50)
@given(parts=PARTS, dtype=DTYPES, cuts=st.lists(st.integers(0, 32), min_size=4, max_size=4))
def test_reads_as_one_concatenated_text(parts, dtype, cuts):
    stream = TokenStream([np.array(part, dtype) for part in parts])
    text = np.concatenate([np.array(part, np.int64) for part in parts])
    (start, stop), (inner_start, inner_stop) = sorted(cuts[:2]), sorted(cuts[2:])
    assert len(stream) == len(text)
    read = stream.read(start, stop)
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read, text[start:stop])
    view = stream.view(start, stop)
    assert len(view) == len(text[start:stop])
    np.testing.assert_array_equal(
        view.read(inner_start, inner_stop), text[start:stop][inner_start:inner_stop]
    )


def test_a_view_copies_nothing_and_a_read_does():
    part = np.arange(10, dtype=np.int32)
    stream = TokenStream([part])
    assert np.shares_memory(stream.view(2, 7).parts[0], part)
    assert not np.shares_memory(stream.read(2, 7), part)
