import numpy as np
import pytest

from jpipe.data import files, load_tokens


def npy(array):
    return lambda path: np.save(path, array)


def raw(content):
    return lambda path: path.write_bytes(content)


def cut_npy(path):
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:-8])


MALFORMED = {
    "missing": ("a.txt", lambda path: None, "cannot be read.*check the path"),
    "missing bin": ("a.bin", lambda path: None, "cannot be read.*check the path"),
    "missing npy": ("a.npy", lambda path: None, "cannot be read.*check the path"),
    "directory": ("a.txt", lambda path: path.mkdir(), "not a file: name the files in it"),
    "empty text": ("a.txt", raw(b""), "is empty"),
    "empty bin": ("a.bin", raw(b""), "is empty"),
    "empty npy": ("a.npy", raw(b""), "is empty"),
    "npy without tokens": ("a.npy", npy(np.arange(0)), "is empty"),
    "odd bin": ("a.bin", raw(b"abc"), "3 bytes, not a whole number of 2-byte ids"),
    "float npy": ("a.npy", npy(np.ones(4)), r"holds float64 \[4\].*integers"),
    "bool npy": ("a.npy", npy(np.ones(4, bool)), r"holds bool \[4\].*integers"),
    "2-D npy": ("a.npy", npy(np.ones((2, 3), int)), r"holds int64 \[2, 3\].*one dimension"),
    "0-D npy": ("a.npy", npy(np.array(3)), r"holds int64 \[\].*one dimension"),
    "object npy": ("a.npy", npy(np.array([{}], object)), "not a whole .npy file of integers"),
    "truncated npy": ("a.npy", cut_npy, "not a whole .npy file of integers"),
    "no npy at all": ("a.npy", raw(b"once upon a time there was"), "not a whole .npy file"),
    "id too large": ("a.bin", raw(b"\0\0\xff\xff"), "token 1 is 65535, outside vocab_size=1000"),
    "id negative": ("a.npy", npy(np.array([3, 4, -1])), "token 2 is -1, outside vocab_size=1000"),
    "id huge": ("a.npy", npy(np.array([2**40])), "outside vocab_size=1000"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused(case, tmp_path):
    name, make, message = MALFORMED[case]
    path = tmp_path / name
    make(path)
    vocab_size = None if path.suffix == ".txt" else 1000
    with pytest.raises(ValueError, match=message) as caught:
        load_tokens([path], vocab_size)
    assert str(caught.value).startswith(f"data={path}")


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.npy"])
def test_an_unreadable_file_is_a_value_error_with_its_cause(name, tmp_path, monkeypatch):
    path = tmp_path / name
    np.save(tmp_path / "a.npy", np.arange(4))
    path.touch()
    if not path.stat().st_size:
        path.write_bytes(b"abcd")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", refuse)
    monkeypatch.setattr(np.lib.format, "open_memmap", refuse)
    with pytest.raises(ValueError, match=r"a\.... cannot be read \(Permission denied\)") as caught:
        load_tokens([path], None if name == "a.txt" else 1000)
    assert isinstance(caught.value.__cause__, PermissionError)


@pytest.mark.parametrize("bad", [0, 3, 4, 11, 12])
def test_ids_are_checked_in_every_chunk(bad, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHECK_CHUNK", 4)
    ids = np.full(13, 9, np.int32)
    np.save(tmp_path / "a.npy", ids)
    assert files.open_tokens(tmp_path / "a.npy", 10).tolist() == ids.tolist()
    ids[bad] = 10
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(ValueError, match=f"token {bad} is 10, outside vocab_size=10"):
        files.open_tokens(tmp_path / "a.npy", 10)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_a_bin_file_has_the_narrowest_width_for_its_vocabulary(vocab_size, dtype, tmp_path):
    ids = np.array([0, 1, 513, vocab_size - 1], dtype)
    ids.tofile(tmp_path / "a.bin")
    opened = files.open_tokens(tmp_path / "a.bin", vocab_size)
    assert opened.dtype == dtype
    np.testing.assert_array_equal(opened, ids)


def test_files_are_mapped_not_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(64))
    np.arange(64, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.txt").write_bytes(bytes(range(64)))
    for names, vocab_size in ((["a.npy", "a.bin"], 64), (["a.txt"], None)):
        tokens = load_tokens([tmp_path / name for name in names], vocab_size)
        for part in tokens.train.parts + tokens.validation.parts:
            assert isinstance(part, np.memmap)
            assert not part.flags.writeable
