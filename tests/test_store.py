from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pfedgate.core.state import equal
from pfedgate.core.types import State
from pfedgate.engine.files import DamagedError
from pfedgate.engine.store import DiskStore, MemoryStore, Store, TemporaryStore


def state(value: float) -> State:
    return {"w": torch.full((3,), value), "n": torch.tensor(int(value))}


def is_state(a: State | None, b: State) -> bool:
    return a is not None and equal(a, b)


@pytest.fixture(params=["memory", "disk", "temporary"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    kinds = {"memory": MemoryStore, "disk": lambda: DiskStore(tmp_path), "temporary": TemporaryStore}
    made: Store = kinds[request.param]()
    return made


def test_put_and_get(store: Store) -> None:
    assert store.get("a") is None
    for client in ("a", "b/ü ../x", "a"):
        store.put(client, state(1))
    store.commit()
    store.put("a", state(2))
    assert is_state(store.get("a"), state(2))
    assert is_state(store.get("b/ü ../x"), state(1))
    assert store.clients() == ["a", "b/ü ../x"]


def test_what_is_kept_is_a_copy(store: Store) -> None:
    given = state(1)
    store.put("a", given)
    given["w"].add_(1)
    assert is_state(store.get("a"), state(1))


def test_an_empty_state_is_a_state(store: Store) -> None:
    store.put("a", {})
    assert store.get("a") == {}


def test_a_temporary_store_leaves_nothing() -> None:
    store = TemporaryStore()
    store.put("a", state(1))
    root = store.root
    assert root.exists()
    del store
    assert not root.exists()


def test_uncommitted_states_are_forgotten(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put("a", state(1))
    done = store.tag
    store.commit()
    store.put("a", state(2))
    store.put("b", state(2))
    again = DiskStore.recover(tmp_path, done)
    assert is_state(again.get("a"), state(1))
    assert again.get("b") is None
    assert [path.name for path in tmp_path.glob("pending-*")] == [f"pending-{done}"]  # until the next commit


def test_a_commit_on_record_is_finished(tmp_path: Path) -> None:
    """Killed after the checkpoint was written and while files were being moved."""
    store = DiskStore(tmp_path)
    for client in "abcd":
        store.put(client, state(1))
    (moved,) = tmp_path.glob(f"pending-{store.tag}/*/a.safetensors")
    target = tmp_path / "current" / moved.parent.name
    target.mkdir(parents=True)
    os.replace(moved, target / moved.name)
    again = DiskStore.recover(tmp_path, store.tag)
    assert again.clients() == list("abcd")
    assert all(is_state(again.get(client), state(1)) for client in "abcd")


def test_never_committed_means_nothing_is_there(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "private")
    store.put("a", state(1))
    store.commit()
    assert DiskStore.recover(tmp_path / "private", None).clients() == []


def test_a_straggler_of_a_killed_run_writes_where_nobody_looks(tmp_path: Path) -> None:
    old = DiskStore(tmp_path)
    old.commit()
    done = old.tag
    old.commit()
    new = DiskStore.recover(tmp_path, done)
    assert new.tag != old.tag
    old.put("a", state(6))
    assert new.get("a") is None
    new.put("a", state(7))
    new.commit()
    assert is_state(new.get("a"), state(7))


def test_half_a_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    store.put("a", state(1))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        store.put("a", state(2))
    monkeypatch.undo()
    assert is_state(store.get("a"), state(1))
    assert store.clients() == ["a"]
    store.commit()
    assert store.clients() == ["a"]


def test_a_snapshot_stays_as_it_was(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "private")
    store.put("a", state(1))
    store.commit()
    store.snapshot(tmp_path / "best")
    store.put("a", state(2))
    store.put("b", state(2))
    store.commit()
    kept = DiskStore(tmp_path / "best")
    assert kept.clients() == ["a"]
    assert is_state(kept.get("a"), state(1))
    store.snapshot(tmp_path / "best")
    assert DiskStore(tmp_path / "best").clients() == ["a", "b"]


def test_files_are_spread_over_folders(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for at in range(600):
        store.put(f"client{at}", {})
    store.commit()
    folders = list((tmp_path / "current").iterdir())
    assert len(folders) > 150
    assert max(len(list(folder.iterdir())) for folder in folders) < 15


def test_a_state_under_another_name_is_noticed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for client in "ab":
        store.put(client, state(1))
    a, b = sorted(tmp_path.rglob("*.safetensors"))
    b.write_bytes(a.read_bytes())
    with pytest.raises(DamagedError, match="is the state of client"):
        [store.get(client) for client in "ab"]


@pytest.mark.parametrize("client", ["é" * 120, "x" * 250, "~x", "~" + "y" * 300, "..", "a" * 180])
def test_any_name_is_a_file(tmp_path: Path, client: str) -> None:
    store = DiskStore(tmp_path)
    store.put(client, state(1))
    assert is_state(store.get(client), state(1))
    assert store.clients() == [client]


def test_synchronous_writes(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, sync=True)
    store.put("a", state(3))
    assert is_state(store.get("a"), state(3))
