"""Snapshots: what is read is what was written, or it is named and left out."""

import os
import shutil
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import printed

from jpipe.snapshot import (
    DamageError,
    Manifest,
    SnapshotError,
    SnapshotStore,
    newest_good,
    read_snapshot,
    snapshot_folders,
)

STATE = {"a": jnp.arange(600.0).reshape(20, 30), "b": jnp.ones(7, jnp.bfloat16), "n": jnp.int32(3)}
# Reads of Orbax that fail may leave others of theirs without the loop that they would report to.
ORBAX_LEFTOVERS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
EXTRA = {"data": {"next_index": 7}, "text": "ä\n"}


def write(folder, steps=(1,), state=STATE, **settings):
    store = SnapshotStore(folder, **settings)
    for step in steps:
        assert store.save(state, step, EXTRA) >= 0
    store.close()
    return snapshot_folders(folder)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_nothing_to_go_on_from(tmp_path):
    assert newest_good(tmp_path) is None
    assert newest_good(tmp_path / "nowhere") is None


@ORBAX_LEFTOVERS
def test_every_file_may_be_flipped_and_no_number_is_wrong(tmp_path):
    """Each bit flip is found, or is in a file that no number comes from."""
    (good,) = write(tmp_path / "good")
    rng, found = np.random.default_rng(0), 0
    wanted = {f"['{name}']": np.asarray(leaf) for name, leaf in STATE.items()}
    for k, path in enumerate(files(good)):
        for place in rng.integers(0, path.stat().st_size, 6):
            bad = tmp_path / f"bad-{k}-{place}"
            shutil.copytree(good, bad)
            target = bad / path.relative_to(good)
            content = bytearray(target.read_bytes())
            content[place] ^= 1 << int(rng.integers(8))
            target.write_bytes(content)
            try:
                snapshot = read_snapshot(bad)
            except DamageError:
                found += 1
                continue
            for name, array in wanted.items():
                assert snapshot.arrays[name].tobytes() == array.tobytes()
            assert snapshot.manifest.extra == EXTRA
    assert found >= 10


@ORBAX_LEFTOVERS
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_files(tmp_path, share):
    (good,) = write(tmp_path / "good")
    for k, path in enumerate(files(good)):
        bad = tmp_path / f"bad-{k}"
        shutil.copytree(good, bad)
        os.truncate(bad / path.relative_to(good), int(path.stat().st_size * share))
        try:
            snapshot = read_snapshot(bad)
        except DamageError:
            continue
        assert snapshot.arrays["['a']"].tobytes() == np.asarray(STATE["a"]).tobytes()


@ORBAX_LEFTOVERS
def test_missing_files(tmp_path):
    (good,) = write(tmp_path / "good")
    found = 0
    for k, path in enumerate(files(good)):
        bad = tmp_path / f"bad-{k}"
        shutil.copytree(good, bad)
        (bad / path.relative_to(good)).unlink()
        try:
            read_snapshot(bad)
        except DamageError:
            found += 1
    assert found >= 4


@ORBAX_LEFTOVERS
def test_falls_back_to_the_newest_good_one(tmp_path):
    one, two, three, four = write(tmp_path, (1, 2, 3, 4), keep_last=4)
    shutil.rmtree(four)
    four.mkdir()
    content = bytearray((three / "manifest.json").read_bytes())
    content[100] ^= 1
    (three / "manifest.json").write_bytes(content)
    (two / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged and left out") as warned:
        snapshot = newest_good(tmp_path)
    assert snapshot.path == one
    named = [str(w.message) for w in warned]
    assert [path.name in text for path, text in zip([four, three, two], named, strict=True)]
    assert "empty, or half-written" in named[0]
    assert "checksum" in named[1]


def test_none_good_is_an_error(tmp_path):
    (only,) = write(tmp_path)
    (only / "manifest.json").unlink()
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(SnapshotError, match="none of the 1 snapshots"),
    ):
        newest_good(tmp_path)


def test_a_wrong_number_is_named_with_its_place(tmp_path):
    """Orbax gives back what it finds; here another, sound, array in the place of the right one."""
    (right,) = write(tmp_path / "right")
    (wrong,) = write(tmp_path / "wrong", state={**STATE, "a": STATE["a"].at[3, 4].add(1e-3)})
    shutil.rmtree(right / "state")
    shutil.copytree(wrong / "state", right / "state")
    with pytest.raises(DamageError, match=r"\['a'\]\[0:20, 0:30\] has the CRC32 [0-9a-f]{8}, it"):
        read_snapshot(right)


def test_keeps_the_newest_and_every_so_many(tmp_path):
    kept = write(tmp_path, range(1, 12), keep_last=2, keep_every=4)
    assert [path.name for path in kept] == [
        "step-00000004",
        "step-00000008",
        "step-00000010",
        "step-00000011",
    ]
    assert all(path in kept for path in tmp_path.iterdir())


def test_what_was_half_written_is_cleared_away(tmp_path):
    half = tmp_path / ".writing-step-00000009"
    (half / "state").mkdir(parents=True)
    (tmp_path / ".deleted-step-00000001").mkdir()
    assert newest_good(tmp_path) is None
    (only,) = write(tmp_path)
    assert list(tmp_path.iterdir()) == [only]


def test_the_same_step_again(tmp_path):
    write(tmp_path)
    write(tmp_path, state={**STATE, "n": jnp.int32(4)})
    assert int(newest_good(tmp_path).arrays["['n']"]) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_killed_while_the_same_step_takes_its_place(tmp_path):
    """The one before is out of the way by then, and must still be found."""
    write(tmp_path)
    code = f"""
    import os
    from pathlib import Path
    import jax.numpy as jnp
    from jpipe.snapshot import SnapshotStore

    replace = os.replace

    def dying(source, target):
        if Path(target).name == "step-00000001":
            print("there", flush=True)
            os._exit(0)
        replace(source, target)

    os.replace = dying
    store = SnapshotStore(Path({str(tmp_path)!r}))
    store.save({{"n": jnp.int32(5)}}, 1, {{}})
    store.close()
    """
    assert printed(code) == ["there"]
    assert int(newest_good(tmp_path).arrays["['n']"]) == 3
    write(tmp_path, (1, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_what_is_out_of_the_way_stays_until_there_is_another(tmp_path):
    """Killed before its removal, it may be the only good one."""
    (only,) = write(tmp_path)
    shutil.copytree(only, tmp_path / "step-00000001~")
    (only / "manifest.json").write_text("{}")
    store = SnapshotStore(tmp_path)
    with pytest.warns(UserWarning, match="step-00000001 is damaged"):
        assert newest_good(tmp_path).path.name == "step-00000001~"
    store.save(STATE, 1, EXTRA)
    store.close()
    assert list(tmp_path.iterdir()) == [only]
    assert newest_good(tmp_path).path == only


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    store = SnapshotStore(tmp_path / "file")
    with pytest.raises(SnapshotError, match="snapshot step-00000001 could not be written"):
        store.save(STATE, 1, EXTRA)
    store.close()


def test_a_full_disk_is_said_once_and_leaves_what_was_there(tmp_path):
    """Files may not grow beyond 64 KiB: writing fails in the background."""
    said = " ".join(
        printed(f"""
import resource, signal
from pathlib import Path
import jax.numpy as jnp
from jpipe.snapshot import SnapshotError, SnapshotStore, newest_good, snapshot_folders
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path({str(tmp_path)!r})
import jax
state = {{"x": jax.random.normal(jax.random.key(0), (100_000,))}}
store = SnapshotStore(folder)
store.save(state, 1, {{}})
store.wait()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
try:
    store.save(state, 2, {{}})
    store.wait()
    print("no error")
except SnapshotError as error:
    print("error:", error)
store.poll()
print([p.name for p in folder.iterdir()])
print(newest_good(folder).manifest.step)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
store.save(state, 3, {{}})
store.close()
print(newest_good(folder).manifest.step)
""")
    )
    assert said.startswith("error: the snapshot step-00000002 could not be written:")
    assert said.endswith("['step-00000001'] 1 3")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk; files of limited size are tested above")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_small_disk_that_fills_up(small_disk):
    folder, store = small_disk / "snapshots", SnapshotStore(small_disk / "snapshots", keep_last=9)
    state = {"x": jax.random.normal(jax.random.key(0), (150_000,))}  # 600 kB
    written, failed = [], []
    for step in range(1, 7):
        try:
            store.save(state, step, EXTRA)
            store.wait()
            written.append(step)
        except SnapshotError as error:
            failed.append(str(error))
    assert written
    assert failed
    assert all("could not be written" in told for told in failed)
    assert [p.name for p in snapshot_folders(folder)] == [f"step-{k:08d}" for k in written]
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{k:08d}" for k in written]
    assert newest_good(folder).manifest.step == written[-1]
    shutil.rmtree(folder / f"step-{written[0]:08d}")  # there is room again
    store.save(state, 9, EXTRA)
    store.close()
    assert newest_good(folder).manifest.step == 9


def test_what_another_process_gives_up_is_not_waited_for(tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path)
    partial = tmp_path / ".writing-step-00000001"
    partial.mkdir()
    (partial / "0-manifest.json").write_bytes(Manifest(1, 0, {}, {}).to_bytes())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    giving_up = threading.Timer(0.5, store._discard, [partial])
    giving_up.start()
    with pytest.raises(OSError, match="process 1 could not write its part"):
        store._commit(partial, tmp_path / "step-00000001", Manifest(1, 0, {}, {}))
    giving_up.join()
    assert not list(tmp_path.iterdir())


def test_what_belongs_to_it_is_that_of_the_moment(tmp_path):
    extra, store = {"cursor": 1}, SnapshotStore(tmp_path)
    store.save(STATE, 1, extra)
    extra["cursor"] = 2
    store.close()
    assert newest_good(tmp_path).manifest.extra == {"cursor": 1}


def test_the_one_just_written_is_never_retired(tmp_path):
    write(tmp_path, (10, 20, 30, 5), keep_last=2)
    assert [p.name for p in snapshot_folders(tmp_path)] == [
        "step-00000005",
        "step-00000020",
        "step-00000030",
    ]
    store = SnapshotStore(tmp_path)
    store.forget_after(20, 0)
    store.close()
    assert [p.name for p in snapshot_folders(tmp_path)] == ["step-00000005", "step-00000020"]


@pytest.mark.parametrize(
    ("state", "step", "said"),
    [
        ({"a": np.ones(2)}, 1, r"\['a'\] is a ndarray"),
        ({"a": 3}, 1, r"\['a'\] is a int"),
        ({}, 1, "holds no numbers"),
        (STATE, -1, "step=-1"),
    ],
)
def test_refuses_what_is_no_state(tmp_path, state, step, said):
    store = SnapshotStore(tmp_path)
    with pytest.raises(ValueError, match=said):
        store.save(state, step, {})
    store.close()


@pytest.mark.parametrize(
    ("settings", "said"), [({"keep_last": 0}, "keep_last=0"), ({"keep_every": 0}, "keep_every=0")]
)
def test_refuses(tmp_path, settings, said):
    with pytest.raises(ValueError, match=said):
        SnapshotStore(tmp_path, **settings)
