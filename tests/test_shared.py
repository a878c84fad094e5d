"""The feature store on fsspec paths: two machines (cache folders) behind one place, and a place that is not well."""

from __future__ import annotations

import shutil
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from mergedarts import heads
from mergedarts.errors import UserError
from mergedarts.files import cache_dir
from mergedarts.shared import MARK, Shared
from mergedarts.store import FeatureStore
from tests.tiny import tiny

VALUES = {"hidden": torch.arange(12.0).reshape(4, 3)}


@pytest.fixture(params=["memory", "file", "path"])
def place(request, tmp_path):
    """An address of each kind, and its file system."""
    urls = {"memory": f"memory://{uuid.uuid4().hex}/features", "file": f"file://{tmp_path}/s", "path": f"{tmp_path}/s"}
    return Shared.opened(urls[request.param], tmp_path)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Go to a machine of a name: its own cache folder."""
    return lambda name: monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path / "machines" / name))


def store_of(place, model="model"):
    return FeatureStore(model, "prompts", torch.float32, place)


def contents(place):
    """Bytes by name of all files of a place."""
    fs, root = fsspec.core.url_to_fs(place.url)
    return {path.removeprefix(root.rstrip("/") + "/"): fs.cat_file(path) for path in fs.find(root)}


def put(place, key, data):
    fs, root = fsspec.core.url_to_fs(place.url)
    fs.pipe_file(f"{root.rstrip('/')}/{key}", data)


def make(place, *names):
    store = store_of(place)
    with store.making(*names) as missing:
        for name in missing:
            store.save(name, VALUES)
    return store


def test_what_one_machine_makes_another_has(place, machine):
    machine("a")
    made = make(place, "final", "layer-0")
    with made.writers({"layer-1": (4, 3)}, torch.float32) as writers:
        writers["layer-1"].write(0, VALUES["hidden"] * 2)
    with made.making("final", "layer-0", "layer-1") as missing:
        assert missing == []
    stored = {path.name: path.read_bytes() for path in made.path.iterdir()}
    assert set(contents(place)) == {MARK} | {f"features/{made.path.name}/{name}" for name in stored}
    machine("b")
    store = store_of(place)
    assert store.has("final")
    assert not store.is_local("final")
    assert not store.has("entropy")
    with store.making("final", "layer-0", "layer-1", "entropy") as missing:
        assert missing == ["entropy"]
    assert torch.equal(store.load("final")["hidden"], VALUES["hidden"])
    with store.reading(["layer-1"]) as read:
        assert torch.equal(read("layer-1", 1, 3), VALUES["hidden"][1:3] * 2)
    assert store.is_local("final")
    assert not store.is_local("layer-0"), "what is not read is not fetched"
    fetched = {path.name: path.read_bytes() for path in store.path.iterdir()}
    assert fetched == {name: stored[name] for name in ("final.safetensors", "layer-1.safetensors")}
    assert not store_of(place, "another").has("final")


def test_what_was_made_before_is_shared_at_the_next_look(place, machine):
    machine("a")
    make(None, "final", "layer-0")
    assert set(contents(place)) == {MARK}
    make(place, "final")
    assert len(contents(place)) == 3
    machine("b")
    assert store_of(place).has("layer-0")


def test_a_block_that_fails_shares_nothing(place, machine):
    machine("a")
    store = store_of(place)

    def fail():
        with store.making("final", "layer-0"):
            store.save("final", VALUES)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert set(contents(place)) == {MARK}


@pytest.mark.parametrize("spoil", ["flipped", "cut", "empty", "foreign"])
def test_a_file_there_that_is_not_whole_is_named_and_not_kept(place, machine, spoil):
    machine("a")
    key = f"features/{make(place, 'final').path.name}/final.safetensors"
    whole = contents(place)[key]
    from safetensors.torch import save

    foreign = save(VALUES)
    put(place, key, {"flipped": whole[:-1] + b"x", "cut": whole[:-5], "empty": b"", "foreign": foreign}[spoil])
    machine("b")
    store = store_of(place)
    with pytest.raises(
        UserError, match=r"is (damaged|not a whole).*; remove it, and it will be made again\.$"
    ) as caught:
        store.load("final")
    assert str(caught.value).startswith(f"{place}/{key} is ")
    assert list(store.path.iterdir()) == []


def test_a_file_that_vanishes_is_missing(place, machine):
    machine("a")
    make(place, "final")
    machine("b")
    with pytest.raises(UserError, match=r"gone\.safetensors is missing"):
        store_of(place).load("gone")


def test_output_embeddings_are_shared(place, machine):
    model, other = tiny("qwen2"), tiny("qwen2", seed=1)
    machine("a")
    store = store_of(place)
    with store.making("head"):
        heads.keep_head(model, store)
        heads.share_head(store)
    machine("b")
    store = store_of(place)
    weight, bias = heads.load_head(store, other)
    assert torch.equal(weight, model.get_output_embeddings().weight)
    assert bias is None
    (key,) = (key for key in contents(place) if key.startswith("heads/"))
    put(place, key, contents(place)[key][:-1] + b"x")
    shutil.rmtree(cache_dir() / "heads")
    with pytest.raises(UserError, match="is damaged") as caught:
        heads.load_head(store, other)
    assert str(caught.value).startswith(f"{place}/{key} is ")
    assert list((cache_dir() / "heads").iterdir()) == []


def test_a_copy_cut_short_takes_no_name(tmp_path, machine, monkeypatch):
    """On a file system of folders the copy is made beside its place."""
    place = Shared.opened(str(tmp_path / "s"), tmp_path)

    def half(self, source, target, **kwargs):
        Path(target).write_bytes(Path(source).read_bytes()[:9])
        raise OSError("connection lost")

    machine("a")
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "put_file", half)
        with pytest.raises(UserError, match=r"The store .*/s cannot be used .*lost"):
            make(place, "final")
    assert set(contents(place)) == {MARK}
    make(place, "final")
    assert len(contents(place)) == 2


class Objects(MemoryFileSystem):
    """An object store: what is put is there when it is whole; a folder that is made would be a bucket."""

    protocol = "tos"

    def makedirs(self, *args, **kwargs):
        raise AssertionError

    def mkdirs(self, path, exist_ok=False):
        """What fsspec's own way of putting a file calls."""
        super().makedirs(path, exist_ok=exist_ok)

    def mv(self, *args, **kwargs):
        raise AssertionError


class Locked(MemoryFileSystem):
    """One whose door is shut, by an exception of its own."""

    protocol = "locked"

    class NoCredentialsError(Exception):
        pass

    def exists(self, *args, **kwargs):
        raise self.NoCredentialsError("Unable to locate credentials\nTraceback ...")


@pytest.fixture(autouse=True, scope="module")
def registered():
    for kind in (Objects, Locked):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)


def test_objects_are_put_at_once(machine, tmp_path):
    machine("a")
    name = uuid.uuid4().hex
    make(Shared.opened(f"tos://{name}/features", tmp_path), "final")
    machine("b")
    assert store_of(Shared(f"tos://{name}/features")).has("final")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("foo://x/y", ["The store foo://x/y is of a kind", "s3://bucket"]),
        ("s3://bucket/x", ["The store s3://bucket/x needs a package", "s3fs"]),
        (
            "locked://u:secret@host/x",
            ["locked://host/x cannot be used (NoCredentialsError: Unable to", "check the addr"],
        ),
        ("file-in-the-way/x", ["file-in-the-way/x cannot be used", "check the address"]),
    ],
)
def test_a_place_that_cannot_be_used_is_said(url, words, tmp_path, monkeypatch):
    (tmp_path / "file-in-the-way").write_text("")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError) as caught:
        Shared.opened(url, tmp_path)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert "secret" not in text
    assert text.endswith(".")


def test_where_the_place_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("MERGEDARTS_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    assert Shared.opened(None, base) is None
    assert Shared.opened("s", base) == Shared(str(base / "s"))
    assert (base / "s" / MARK).is_file()
    monkeypatch.setenv("MERGEDARTS_STORE", "own")
    assert Shared.opened(None, base) == Shared(str(tmp_path / "own"))
    assert Shared.opened("s", base) == Shared(str(base / "s"))
    monkeypatch.setenv("MERGEDARTS_STORE", "")
    assert Shared.opened(None, base) is None
