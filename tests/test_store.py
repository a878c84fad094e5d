"""The feature store: keys, whole files or none, errors that name the file."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from mergedarts import store as store_module
from mergedarts.errors import UserError
from mergedarts.prompts import PromptSet, TokenSequence
from mergedarts.store import FeatureStore, digest_tensors, load_tensors, save_tensors
from tests.tiny import prompt_set


def a_store():
    return FeatureStore("model", "prompts", torch.float32)


def files(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_the_key_depends_on_model_prompts_and_dtype(monkeypatch):
    stores = [
        FeatureStore("model", "prompts", torch.float32),
        FeatureStore("model2", "prompts", torch.float32),
        FeatureStore("model", "prompts2", torch.float32),
        FeatureStore("model", "prompts", torch.bfloat16),
        FeatureStore("modelp", "rompts", torch.float32),
    ]
    assert len({s.path for s in stores}) == 5
    assert FeatureStore("model", "prompts", torch.float32).path == stores[0].path
    monkeypatch.setattr(store_module, "VERSION", "next")
    assert a_store().path != stores[0].path


def test_the_digest_of_prompts_depends_on_ids_marks_and_order():
    base = prompt_set((4, 5))
    first, second = base.sequences
    other_id = TokenSequence((first.ids[0] + 1, *first.ids[1:]), first.predicts)
    other_mark = TokenSequence(first.ids, (not first.predicts[0], *first.predicts[1:]))
    joined = TokenSequence(first.ids + second.ids, first.predicts + second.predicts)
    sets = [base, *(PromptSet(x) for x in ((other_id, second), (other_mark, second), (second, first), (joined,)))]
    assert len({s.digest for s in sets}) == 5
    assert PromptSet((first, second)).digest == base.digest


def test_digest_of_tensors():
    a = {"x": torch.arange(6.0), "y": torch.zeros(2)}
    others = [
        {"x": torch.arange(6.0), "z": torch.zeros(2)},
        {"x": torch.arange(6.0).reshape(2, 3), "y": torch.zeros(2)},
        {"x": torch.arange(6.0).to(torch.float64), "y": torch.zeros(2)},
        {"x": torch.arange(6.0) + 1e-6, "y": torch.zeros(2)},
        {"x": torch.arange(6.0)},
    ]
    assert len({digest_tensors(t) for t in [a, *others]}) == 6
    strided = {"y": torch.zeros(2), "x": torch.arange(12.0)[::2] / 2}
    assert digest_tensors(strided) == digest_tensors(a)
    assert digest_tensors({"x": torch.ones(3, dtype=torch.bfloat16)}) != digest_tensors({"x": torch.ones(3)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_written_in_any_order(dtype):
    store = a_store()
    want = torch.randn(7, 5).to(dtype)
    with store.writers({"final": (7, 5), "layer-0": (7, 5)}, dtype) as writers:
        for start, end in ((4, 7), (0, 1), (1, 4)):
            writers["final"].write(start, want[start:end])
            writers["layer-0"].write(start, want[start:end] * 2)
        assert not store.has("final")
    assert store.has("final")
    assert files(store.path) == ["final.safetensors", "layer-0.safetensors"]
    assert torch.equal(store.load("final")["hidden"], want)
    assert torch.equal(load_file(store.path / "layer-0.safetensors")["hidden"], want * 2)


def test_rows_are_cast_and_made_contiguous():
    store = a_store()
    values = torch.randn(5, 8, dtype=torch.float64)[:, ::2]
    with store.writers({"final": (5, 4)}, torch.bfloat16) as writers:
        writers["final"].write(0, values)
    assert torch.equal(store.load("final")["hidden"], values.to(torch.bfloat16))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_block_leaves_no_file(error):
    store = a_store()

    def fail():
        with store.writers({"final": (4, 2), "layer-1": (4, 2)}, torch.float32) as writers:
            writers["final"].write(0, torch.ones(4, 2))
            raise error("stop")

    with pytest.raises(error):
        fail()
    assert files(store.path) == []


def test_an_exception_in_the_block_leaves_the_old_file():
    store = a_store()
    store.save("final", {"hidden": torch.ones(2, 2)})

    def fail():
        with store.writers({"final": (2, 2)}, torch.float32) as writers:
            writers["final"].write(0, torch.zeros(2, 2))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.equal(store.load("final")["hidden"], torch.ones(2, 2))
    assert files(store.path) == ["final.safetensors"]


def test_save_that_fails_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "x.safetensors"
    save_tensors(path, {"a": torch.ones(3)})

    def half(tensors, where, metadata=None):
        where.write_bytes(b"half")
        raise RuntimeError("stop")

    monkeypatch.setattr(store_module, "save_file", half)
    with pytest.raises(RuntimeError):
        save_tensors(path, {"a": torch.zeros(3)})
    assert torch.equal(load_tensors(path, "x")["a"], torch.ones(3))
    assert files(tmp_path) == ["x.safetensors"]


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "save_file", full)
    with pytest.raises(UserError, match=f"No space left to write {tmp_path}/x"):
        save_tensors(tmp_path / "x", {"a": torch.ones(1)})


def test_a_write_cut_short_does_not_pass_as_whole(monkeypatch):
    """POSIX lets pwrite write less than it was given (a disk that fills up); the rest may not become zeros."""
    store = a_store()
    real = os.pwrite
    monkeypatch.setattr(
        store_module.os, "pwrite", lambda fd, data, at: real(fd, bytes(data)[: max(1, len(data) // 2)], at)
    )
    try:
        with store.writers({"final": (4, 2)}, torch.float32) as writers:
            writers["final"].write(0, torch.ones(4, 2))
    except (OSError, UserError):
        assert files(store.path) == []
    else:
        assert torch.equal(store.load("final")["hidden"], torch.ones(4, 2))


@pytest.mark.parametrize("keep", [0, 4, 40, -1], ids=lambda n: f"cut at {n}")
def test_a_truncated_file_is_named(keep):
    store = a_store()
    store.save("final", {"hidden": torch.ones(30, 2)})
    path = store.path / "final.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="(not a whole safetensors file|damaged).*remove it") as caught:
        store.load("final")
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="gone.safetensors is missing; mend it"):
        load_tensors(tmp_path / "gone.safetensors", "mend it")


def test_save_takes_views_and_shared_memory(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    save_tensors(tmp_path / "x", {"a": base.T, "b": base[:, 1:3]})
    got = load_tensors(tmp_path / "x", "")
    assert torch.equal(got["a"], base.T)
    assert torch.equal(got["b"], base[:, 1:3])


def test_rows_are_read_without_the_rest():
    store = FeatureStore("m", "p", torch.bfloat16)
    whole = torch.randn(9, 4).bfloat16()
    for name in ("layer-0", "layer-1"):
        store.save(name, {"hidden": whole * (1 if name == "layer-0" else 2)})
    with store.reading(["layer-0", "layer-1"]) as read:
        assert torch.equal(read("layer-0", 2, 5), whole[2:5])
        assert torch.equal(read("layer-1", 0, 9), whole * 2)


def test_rows_of_a_broken_file():
    store = FeatureStore("m", "p", torch.bfloat16)
    store.save("layer-0", {"hidden": torch.zeros(2, 2)})
    (store.path / "layer-0.safetensors").write_bytes(b"short")
    with (
        pytest.raises(UserError, match=r"layer-0\.safetensors is not a whole safetensors file"),
        store.reading(["layer-0"]),
    ):
        pass
