import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jpipe.data import TokenStream, load_tokens
from jpipe.data.tokens import _split
from jpipe.data.windows import Windows


def whole(stream):
    return stream.read(0, len(stream))


def test_the_default_text_is_english_and_the_same_every_time():
    first, second = load_tokens(), load_tokens([])
    assert first.is_bytes
    assert first.vocab_size == 256
    np.testing.assert_array_equal(whole(first.train), whole(second.train))
    np.testing.assert_array_equal(whole(first.validation), whole(second.validation))
    text = whole(first.train).astype(np.uint8).tobytes()
    assert len(text) > 200_000
    assert text.count(b" the ") > 2_000
    assert f"{len(text):,} bytes to train" in first.description
    assert f"{len(first.validation):,} to validate" in first.description


def test_the_default_text_does_not_teach_its_validation_text_by_heart():
    tokens = load_tokens()
    train = whole(tokens.train).astype(np.uint8).tobytes()
    held_out = whole(tokens.validation).astype(np.uint8).tobytes()
    size = 40
    known = {train[i : i + size] for i in range(len(train) - size + 1)}
    pieces = [held_out[i : i + size] for i in range(len(held_out) - size + 1)]
    # With every copy of a paragraph kept it would be 0.48.
    assert np.mean([piece in known for piece in pieces]) < 0.1


LENGTHS = st.lists(st.integers(1, 60) | st.integers(1, 3 * 20480), min_size=1, max_size=4)


@settings(deadline=None, max_examples=50)
@given(lengths=LENGTHS, context=st.integers(1, 64))
@example(lengths=[16 * 20480 + 7], context=128)
def test_no_training_window_holds_a_held_out_token(lengths, context):
    total = sum(lengths)
    text = np.arange(total)
    train, validation = _split(TokenStream(np.split(text, np.cumsum(lengths)[:-1])))
    held_out = whole(validation)
    np.testing.assert_array_equal(np.sort(np.concatenate([whole(train), held_out])), text)
    assert total // 10 - 16 <= len(validation) <= total // 10
    if len(train) > context:
        windows = Windows(train, context, "training")
        for i in {0, len(windows) // 2, len(windows) - 1}:
            assert not np.isin(windows[i], held_out).any()


def test_the_held_out_text_comes_from_all_over():
    total = 1_000_000
    _, validation = _split(TokenStream([np.arange(total)]))
    sixteenths, counts = np.unique(whole(validation) * 16 // total, return_counts=True)
    assert sixteenths.tolist() == list(range(16))
    assert np.ptp(counts) <= 1


def test_several_files_are_one_text_in_the_order_given(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"b" * 15)
    (tmp_path / "a.md").write_bytes(b"a" * 5)
    tokens = load_tokens([str(tmp_path / "b.txt"), tmp_path / "a.md"])
    assert whole(tokens.train).astype(np.uint8).tobytes() == b"b" * 15 + b"a" * 3
    assert whole(tokens.validation).astype(np.uint8).tobytes() == b"aa"
    assert (
        tokens.description == f"{tmp_path / 'b.txt'} and 1 more: 18 bytes to train, 2 to validate"
    )


def test_token_files(tmp_path):
    np.arange(20, dtype="<u2").tofile(tmp_path / "a.bin")
    tokens = load_tokens([tmp_path / "a.bin"], 20)
    assert not tokens.is_bytes
    assert tokens.vocab_size == 20
    assert tokens.description == f"{tmp_path / 'a.bin'}: 18 tokens to train, 2 to validate"
    assert whole(tokens.train).tolist() == list(range(18))


@pytest.mark.parametrize(
    ("names", "vocab_size", "message"),
    [
        (["a.txt", "a.bin"], 300, r"data=.*a\.txt .*a\.bin mixes text with token files.*one kind"),
        (["a.bin"], None, "vocab_size=None, but data names token files.*pass the size"),
        (["a.bin"], 0, "vocab_size=0 must lie between"),
        (["a.bin"], 2**31 + 1, "vocab_size=2147483649 must lie between"),
        (["a.txt"], 255, "vocab_size=255 is too small for text.*at least 256"),
        ([], -1, "vocab_size=-1 is too small for text"),
        (["a.txt", "b.txt", "../a.txt"], None, r"data=.*\.\./a\.txt is named twice"),
    ],
)
def test_bad_arguments(names, vocab_size, message, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"abcd")
    if "../a.txt" in names:
        (tmp_path / "a.txt").unlink()
        (tmp_path / "a.txt").symlink_to(folder / "a.txt")
    with pytest.raises(ValueError, match=message):
        load_tokens([folder / name for name in names], vocab_size)


def test_text_may_have_a_larger_vocabulary():
    assert load_tokens([], 512).vocab_size == 512


def test_python_without_its_help_topics(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="installed without pydoc_data: name a text file"):
        load_tokens()
