"""`calibrate` with a store that machines share: the second machine runs no expert, and the same model comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import DOMAINS, World, is_mistake, ran, write_yaml

FILES = ("corrections.safetensors", "router.safetensors")


@pytest.mark.slow
def test_a_second_machine_takes_the_features(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run file's key at first, by the variable then; what is written names neither."""
    from mergedarts import features

    made = {}
    for machine in "ab":
        monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path / machine))
        store = {"store": "shared"} if machine == "a" else {}
        run = write_yaml(tmp_path / f"{machine}.yml", world.run(*DOMAINS, **store))
        done = ran("calibrate", run, "--out", tmp_path / f"out-{machine}", "--json")
        assert done.code == 0, done.err
        made[machine] = done.json
        del made[machine]["seconds"]
        for name in ("collect", "continuations"):
            monkeypatch.setattr(features, name, lambda *args, **kwargs: pytest.fail("a model was run"))
        monkeypatch.setenv("MERGEDARTS_STORE", str(tmp_path / "shared"))
    assert made["a"] == made["b"]
    assert "shared" not in (tmp_path / "out-a" / "darts_config.json").read_text()
    for name in FILES:
        assert (tmp_path / "out-a" / name).read_bytes() == (tmp_path / "out-b" / name).read_bytes()
    assert not [path for path in (tmp_path / "shared").rglob("*") if path.suffix == ".tmp"]


@pytest.mark.parametrize(
    ("store", "word"), [("foo://x", "foo://x"), ("", "'store'"), ("darts.yml/x", "cannot be used")], ids=str
)
def test_a_store_that_cannot_be_used(world: World, tmp_path: Path, store: str, word: str) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run(store=store))
    is_mistake(ran("calibrate", run, "--out", tmp_path / "out"), word)
    assert not (tmp_path / "out").exists()
