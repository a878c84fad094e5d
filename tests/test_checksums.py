"""Checksums: what is stored is what was written, or is named."""

from __future__ import annotations

import hashlib
import os
import subprocess

import pytest
import torch

from mergedarts import checksums
from mergedarts.checksums import (
    SUMS,
    check_seal,
    check_sum,
    digest_files,
    read_checked,
    write_checked,
    write_sums,
)
from mergedarts.errors import UserError
from mergedarts.files import digest_text
from mergedarts.store import FeatureStore


def test_digest_of_files(tmp_path):
    def digest(contents):
        root = tmp_path / digest_text(repr(contents))
        root.mkdir(exist_ok=True)
        for name, text in contents.items():
            (root / name).write_text(text)
        return digest_files([root / n for n in contents], root)

    base = digest({"a": "1", "b": "2"})
    assert digest({"b": "2", "a": "1"}) == base  # neither order nor folder counts
    others = [
        digest(c) for c in ({"a": "1", "b": "3"}, {"a": "2", "b": "1"}, {"a": "1", "c": "2"}, {"a": "1"}, {"a": "12"})
    ]
    assert len({base, *others}) == 6


def test_digest_of_a_changed_file_is_made_anew(tmp_path):
    path = tmp_path / "w"
    path.write_text("one")
    first = digest_files([path], tmp_path)
    assert digest_files([path], tmp_path) == first
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    second = digest_files([path], tmp_path)
    assert second != first
    path.write_text("one")
    assert digest_files([path], tmp_path) == first


def test_digests_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "LEAST_REMEMBERED", 0)
    path = tmp_path / "w"
    path.write_text("one")
    first = digest_files([path], tmp_path)
    monkeypatch.setattr(checksums, "hash_file", lambda path: pytest.fail("read twice"))
    assert digest_files([path], tmp_path) == first


def test_a_broken_memory_of_a_digest_is_not_trusted(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(checksums, "LEAST_REMEMBERED", 0)
    path = tmp_path / "w"
    path.write_text("one")
    first = digest_files([path], tmp_path)
    for known in (own_cache / "digests").iterdir():
        known.write_text("half")
    assert digest_files([path], tmp_path) == first


def folder_of(tmp_path, **files):
    root = tmp_path / "folder"
    (root / "deep").mkdir(parents=True)
    for name, data in files.items():
        (root / name.replace("__", "/")).write_bytes(data)
    write_sums(root)
    return root


def test_sums_are_those_of_sha256sum(tmp_path):
    root = folder_of(tmp_path, a=b"one", deep__b=b"two")
    lines = dict(reversed(line.split("  ")) for line in (root / SUMS).read_text().splitlines())
    assert lines == {"a": hashlib.sha256(b"one").hexdigest(), "deep/b": hashlib.sha256(b"two").hexdigest()}
    assert subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("spoil", ["flip", "cut", "empty", "gone"])
def test_a_changed_file_of_a_folder_is_named(tmp_path, spoil):
    root = folder_of(tmp_path, a=bytes(range(100)), b=b"x")
    check_sum(root, "a", "mend")
    data = bytearray((root / "a").read_bytes())
    if spoil == "flip":
        data[57] ^= 1
    (root / "a").write_bytes({"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b"", "gone": b""}[spoil])
    if spoil == "gone":
        (root / "a").unlink()
    with pytest.raises(UserError, match="folder/a .*; mend") as caught:
        check_sum(root, "a", "mend")
    assert "missing" in str(caught.value) if spoil == "gone" else "checksum differs" in str(caught.value)
    check_sum(root, "b", "mend")


def test_a_file_without_a_sum_is_not_taken(tmp_path):
    root = folder_of(tmp_path, a=b"x")
    (root / "b").write_bytes(b"y")
    with pytest.raises(UserError, match="does not name b"):
        check_sum(root, "b", "mend")
    for bad in (b"", b"\xff", b"no sums\n", b"0" * 64 + b"\n"):
        (root / SUMS).write_bytes(bad)
        with pytest.raises(UserError, match="SHA256SUMS is not a list of checksums"):
            check_sum(root, "a", "mend")
    (root / SUMS).unlink()
    with pytest.raises(UserError, match="does not name a"):
        check_sum(root, "a", "mend")


def test_files_that_are_not_what_is_said_beside_them_have_no_digest(tmp_path):
    root = folder_of(tmp_path, a=b"one")
    digest_files([root / "a"], root)
    (root / "a").write_bytes(b"two")
    with pytest.raises(UserError, match=r"folder/a has changed.*remove SHA256SUMS"):
        digest_files([root / "a"], root)
    (root / SUMS).unlink()
    digest_files([root / "a"], root)


def test_the_hubs_cache_names_files_by_their_digest(tmp_path):
    """A snapshot is links to blobs; those of large files are called by their SHA-256."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    blob = blobs / hashlib.sha256(b"weights").hexdigest()
    blob.write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(blob)
    before = digest_files([snapshot / "model.safetensors"], snapshot)
    blob.write_bytes(b"wEights")
    with pytest.raises(UserError, match=r"model\.safetensors has changed since it was written"):
        digest_files([snapshot / "model.safetensors"], snapshot)
    blob.write_bytes(b"weights")
    assert digest_files([snapshot / "model.safetensors"], snapshot) == before


@pytest.mark.parametrize("way", ["save", "rows"])
def test_every_byte_of_a_stored_file_counts(way, monkeypatch):
    store = FeatureStore("m", "p", torch.float32)
    values = torch.randn(3, 2)
    if way == "save":
        store.save("x", {"hidden": values})
    else:
        with store.writers({"x": (3, 2)}, torch.float32) as writers:
            writers["x"].write(1, values[1:])
            writers["x"].write(0, values[:1])
    path = store.path / "x.safetensors"
    whole = path.read_bytes()
    monkeypatch.setattr(checksums, "_checked", set())
    assert torch.equal(store.load("x")["hidden"], values)
    for at in range(len(whole)):
        for bit in (1, 128):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            monkeypatch.setattr(checksums, "_checked", set())
            with pytest.raises(UserError, match=r"x\.safetensors is (damaged|not a whole).*remove it"):
                store.load("x")
            with pytest.raises(UserError, match=r"x\.safetensors is"), store.reading(["x"]):
                pass
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"x\.safetensors is"):
            store.load("x")


def test_a_file_is_read_in_full_once_in_a_process(monkeypatch):
    store = FeatureStore("m", "p", torch.float32)
    store.save("x", {"hidden": torch.ones(3)})
    store.load("x")
    monkeypatch.setattr(checksums, "_crc", lambda stream: pytest.fail("read twice"))
    store.load("x")


def test_a_safetensors_file_without_a_seal_is_not_taken(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="carries no checksum"):
        check_seal(tmp_path / "x.safetensors")


def test_checked_text(tmp_path):
    path = tmp_path / "deep" / "x"
    write_checked(path, 'é\n{"a": 1}\n')
    assert read_checked(path) == 'é\n{"a": 1}\n'
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UserError, match="x is damaged"):
            read_checked(path)
        path.write_bytes(whole[:at])
        with pytest.raises(UserError, match="x is damaged"):
            read_checked(path)
    path.unlink()
    with pytest.raises(UserError, match="x is missing"):
        read_checked(path)
