"""Files of any content: read whole and right, or refused in one sentence that names the file; never a traceback."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from mergedarts import checksums
from mergedarts.card import model_card
from mergedarts.checksums import read_sums, write_sums
from mergedarts.cli.tables import held_out_table, routing_table
from mergedarts.config import Domain, RunFile, read_run_file
from mergedarts.correction import FILE, Correction, Position
from mergedarts.errors import UserError
from mergedarts.merging import resolved_config
from mergedarts.prompts import encode, read_examples
from mergedarts.repaired import CONFIG, read_config, read_corrections, read_router, write_repaired
from mergedarts.router import NAMES, TEMPLATE, Router
from mergedarts.store import FeatureStore
from tests.e2e.conftest import make_tokenizer
from tests.tiny import D, random_site

from .strategies import data, scalars, spoiled, text

pytestmark = pytest.mark.slow


def sentence(error, name):
    """One line that ends like a sentence and names the file."""
    said = str(error)
    assert name in said, said
    assert said.rstrip()[-1] in ".?)", said


# --------------------------------------------------------------------------------------------------------- run files

GOOD = {
    "merged": "m",
    "domains": {"code": {"expert": "e", "prompts": "p", "samples": 3, "rollout": 0}},
    "correction": {"sites": {"every": 2}, "rank": 3, "position": {"smooth": 4}},
    "fit": {"method": "closed-form", "ridge": 0.1, "holdout": 0.2},
    "budget": "0.1%",
}
KEYS = [
    *RunFile.model_fields, "expert", "prompts", "samples", "rollout", "dataset", "column", "sites", "rank", "position",
    "positions", "form", "svd_share", "method", "objective", "metric", "ridge", "loss", "gamma", "steps", "lr",
    "holdout", "every", "table", "smooth", "<<",
]  # fmt: skip
VALUES = [
    "auto", "final", "all", "adam", "closed-form", "paper", "surgery", "none", "constant", "full", "ewl1", "kl", "svd",
    "0.1%", "150%", "bfloat16", 0, 1, 8, 0.5, True,
]  # fmt: skip
keys = st.one_of(st.sampled_from(KEYS), text)
settings_like = st.recursive(
    st.one_of(st.sampled_from(VALUES), scalars),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def read(path, content):
    path.write_bytes(content)
    try:
        return read_run_file(path)
    except UserError as error:
        sentence(error, path.name)
        return None


@given(st.dictionaries(keys, settings_like, max_size=4), st.booleans())
def test_settings_of_any_shape(tmp_path, more, beside):
    whole = {**GOOD, **more} if beside else more
    found = read(tmp_path / "darts.yml", yaml.safe_dump(whole, allow_unicode=True).encode("utf-8", "surrogatepass"))
    assert found is None or RunFile.model_validate(found.model_dump()) == found


@given(spoiled(yaml.safe_dump(GOOD).encode()))
def test_spoiled_run_files(tmp_path, content):
    read(tmp_path / "darts.yml", content)


@given(st.binary(max_size=60) | text.map(lambda t: t.encode("utf-8", "surrogatepass")))
@example(b"a: &a [*a]\n")
@example(b"? {a: 1}\n: 2\n")
@example(b"a: !!timestamp x\n")
@example(b"a: !!binary x\n")
@example(b"a: !!int 0x\n")
@example(b"a: 2001-99-99\n")
def test_run_files_of_any_bytes(tmp_path, content):
    read(tmp_path / "darts.yml", content)


MERGE = {
    "merge_method": "linear", "base_model": "b", "dtype": "float32",
    "models": [{"model": "m", "parameters": {"weight": 0.4}}],
}  # fmt: skip


@given(spoiled(yaml.safe_dump(MERGE).encode()))
def test_spoiled_merge_configs(tmp_path, content):
    path = tmp_path / "merge.yml"
    path.write_bytes(content)
    with suppress(UserError):
        assert isinstance(resolved_config(path), dict)


# ------------------------------------------------------------------------------------------------------ prompt files

TOKENIZER = make_tokenizer()
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": text}),
    max_size=4,
)
rows = st.one_of(
    st.fixed_dictionaries({"prompt": text}, optional={"response": text | st.none()}),
    st.fixed_dictionaries({"messages": turns}),
    data,
)


@given(st.lists(rows, max_size=5), st.sampled_from([2, 5, 400]))
def test_prompts_of_any_shape(tmp_path, lines, most):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    encoded(path, most)


@given(spoiled(b'{"prompt": "what is 3 + 4?", "response": "7"}\n{"prompt": "x"}\n'), st.sampled_from(["jsonl", "txt"]))
def test_spoiled_prompts(tmp_path, content, kind):
    path = tmp_path / f"p.{kind}"
    path.write_bytes(content)
    encoded(path, 400)


def encoded(path, most):
    try:
        examples = read_examples(Domain(expert="e", prompts=str(path), samples=3), "code", path.parent)
    except UserError as error:
        sentence(error, path.name)
        return
    assert 0 < len(examples) <= 3
    try:
        sequences = encode(examples, TOKENIZER, {TOKENIZER.eos_token_id}, most)
    except UserError as error:
        sentence(error, "")
        return
    for one, sequence in zip(examples, sequences, strict=True):
        assert 0 < len(sequence) <= most
        assert len(sequence.predicts) == len(sequence.ids)
        assert not sequence.predicts[-1]
        assert any(role == "assistant" for role, _ in one.turns) or not any(sequence.predicts)
        assert all(0 <= i < len(TOKENIZER) for i in sequence.ids)


# ------------------------------------------------------------------------------------------------ folders of results

CORRECTIONS = {
    "code": Correction({"final": random_site("final", D, D, 1, Position("table", 3), relu=True)}),
    "maths": Correction({"model.layers.0": random_site("residual", D, D, 2, Position("smooth", 2, 9), relu=False)}),
}
MEANS = {"kl": 0.1, "agreement": 0.9, "nll": 1.0, "tokens": 9, "sequences": 2}
ENTRY = {
    "expert": "e", "expert_fingerprint": "f", "sequences": {"fit": 2, "held_out": 1}, "parameters": 9, "shipped": True,
    "held_out": {"merged": MEANS, "repaired": MEANS, "expert": MEANS, "share_closed": None}, "choices": {}, "notes": [],
}  # fmt: skip
DESCRIBED = {
    "mergedarts": "0", "merged": {"model": "m", "fingerprint": "f", "parameters": 99},
    "domains": {"code": ENTRY, "maths": ENTRY}, "parameters": {"added": 9, "share": 0.1},
    "router": {
        "depth": 1, "layers": 2, "second_pass": True, "parameters": 9, "kl": {"code": {"code": 0.1, "unsure": 0.2}},
        "held_out": {"sequences": 2, "accuracy": 0.5, "chosen": {
            "code": {"code": 1, "maths": 0, "unsure": 0}, "maths": {"code": 1, "maths": 0, "unsure": 0},
        }},
    },
    "settings": {
        "preset": "default", "budget": 0.1, "dtype": "float32", "correction": {"form": "auto"},
        "fit": {"method": "adam", "loss": "l1", "seed": 0, "holdout": 0.2},
    },
}  # fmt: skip


def router():
    shapes = ((D,), (D,), (2, D), (1, D), (1,), (3,))
    tensors = {name: torch.ones(shape) for name, shape in zip(NAMES, shapes, strict=True)}
    return Router(["code", "maths"], 1, tensors | {name: torch.zeros(1).long() for name in TEMPLATE})


@pytest.fixture(scope="module")
def repaired(tmp_path_factory):
    """The files of a small repaired model."""
    folder = tmp_path_factory.mktemp("repaired") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEDARTS_CACHE", str(tmp_path_factory.mktemp("cache")))
        write_repaired(folder, DESCRIBED, CORRECTIONS, router())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_folder(folder):
    """What a folder says, or None where it is refused by name; what is read can be shown."""
    try:
        found = read_config(folder), read_corrections(folder), read_router(folder)
    except UserError as error:
        sentence(error, folder.name)
        return None
    assert model_card(found[0], "name").startswith("---")
    held_out_table(found[0])
    if (found[0].get("router") or {}).get("kl"):
        routing_table(found[0])
    return found


@given(st.data(), st.sampled_from([CONFIG, FILE, "router.safetensors", "SHA256SUMS"]), st.booleans())
def test_spoiled_folders(repaired, tmp_path, draw, name, sealed):
    """Spoiled by chance, it is never used; with sums made to fit, as a stranger could, it is read or refused."""
    content = draw.draw(spoiled(repaired[name]))
    folder = tmp_path / "repaired"
    folder.mkdir(exist_ok=True)
    for other, whole in repaired.items():
        (folder / other).write_bytes(content if other == name else whole)
    if sealed and name != "SHA256SUMS":
        write_sums(folder)
    found = read_folder(folder)
    if content == repaired[name]:
        assert found is not None
    elif not sealed and name != "SHA256SUMS":
        assert found is None
    elif found is not None:
        for domain, correction in found[1].items():
            assert all(torch.isfinite(p).all() for p in correction.parameters()), domain


@given(st.data(), data | st.just("remove"))
def test_values_of_any_shape_in_darts_config(repaired, tmp_path, draw, value):
    config = json.loads(repaired[CONFIG])
    at = config
    while True:
        key = draw.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else list(range(len(at)))))
        inner = at[key]
        if not isinstance(inner, dict | list) or not inner or draw.draw(st.booleans()):
            break
        at = inner
    if value == "remove":
        del at[key]
    else:
        at[key] = value
    folder = tmp_path / "repaired"
    folder.mkdir(exist_ok=True)
    for other, whole in repaired.items():
        (folder / other).write_bytes(whole)
    (folder / CONFIG).write_text(json.dumps(config))
    write_sums(folder)
    read_folder(folder)


@given(st.binary(max_size=200) | text.map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_sums_of_any_bytes(tmp_path, content):
    (tmp_path / "SHA256SUMS").write_bytes(content)
    try:
        assert all(len(digest) == 64 for digest in read_sums(tmp_path).values())
    except UserError as error:
        sentence(error, "SHA256SUMS")


# -------------------------------------------------------------------------------------------------- the feature store


@given(st.data(), st.sampled_from(["rows", "save"]))
def test_spoiled_features(tmp_path, draw, way):
    store = FeatureStore(way, "p", torch.bfloat16)
    path = store.path / "final.safetensors"
    values = torch.arange(24).reshape(6, 4).bfloat16()
    if not (store.path / "whole").exists():
        if way == "save":
            store.save("final", {"hidden": values})
        else:
            with store.writers({"final": (6, 4)}, torch.bfloat16) as writers:
                writers["final"].write(0, values)
        (store.path / "whole").write_bytes(path.read_bytes())
    path.write_bytes(draw.draw(spoiled((store.path / "whole").read_bytes())))
    checksums._checked.clear()
    try:
        assert torch.equal(store.load("final")["hidden"], values)
        with store.reading(["final"]) as rows:
            assert torch.equal(rows("final", 1, 3), values[1:3])
    except UserError as error:
        sentence(error, "final.safetensors")
