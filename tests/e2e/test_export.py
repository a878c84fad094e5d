"""`mergedarts export`: each form written, loaded back by the tool it is for, and compared; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .conftest import Ran, World, is_mistake, listing, ran, write_yaml

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def linear(world: World) -> Path:
    """Two domains as low-rank updates of the linear layers."""
    run = write_yaml(
        world.root / "runs" / "linear.yml", world.run("code", "chat", correction={"form": "linear"}, budget=0.3)
    )
    out = world.root / "repaired" / "linear"
    done = ran("calibrate", run, "--out", out, "--json")
    assert done.code == 0, done.err
    assert all(entry["shipped"] for entry in done.json["domains"].values())
    return out


def prompt_ids(tokenizer: Any, text: str) -> torch.Tensor:
    turns = [{"role": "user", "content": text}]
    ids: torch.Tensor = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    return ids


def test_hub(world: World, repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    from transformers import AutoTokenizer, pipeline

    import mergedarts
    from mergedarts.export.hub import load_hub

    before = listing(repaired[0]), listing(world.merged)
    out = tmp_path / "hub"
    done = ran("export", repaired[0], "--format", "hub", "--out", out, "--json")
    assert done.code == 0, done.err
    assert (listing(repaired[0]), listing(world.merged)) == before
    assert done.json["domain"] == "auto"
    assert set(done.json["logits"]) == {"code", "maths", "chat", "none", "auto"}
    assert all(d["largest"] == 0 and d["tokens"] > 0 for d in done.json["logits"].values())
    assert json.loads((out / "mergedarts_export.json").read_text()) == done.json
    card = (out / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert "| auto |" in card

    model, tokenizer, handle = mergedarts.load(repaired[0])
    loaded = load_hub(out, model.dtype, model.device)
    ids = prompt_ids(tokenizer, "what is 4 times 7?")
    for domain in ("code", "auto", "none"):
        handle.domain = None if domain == "none" else domain
        want = model.generate(input_ids=ids, **OPTIONS)
        assert loaded.generate(input_ids=ids, domain=domain, **OPTIONS).tolist() == want.tolist()
    handle.domain = "code"
    want = tokenizer.decode(model.generate(input_ids=ids, **OPTIONS)[0, ids.shape[1] :], skip_special_tokens=True)
    pipe = pipeline("text-generation", model=str(out), tokenizer=AutoTokenizer.from_pretrained(out),
                    trust_remote_code=True, dtype=model.dtype)  # fmt: skip
    turns = [{"role": "user", "content": "what is 4 times 7?"}]
    said = pipe(turns, domain="code", max_new_tokens=8, do_sample=False)
    assert said[0]["generated_text"][-1]["content"] == want
    shown = ran("export", repaired[0], "--format", "hub", "--out", out, "--domain", "code")
    assert shown.code == 0, shown.err  # an earlier export is replaced
    assert json.loads((out / "config.json").read_text())["domain"] == "code"


def test_adapters_and_folded_are_the_correction(world: World, linear: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    import mergedarts
    from mergedarts.models import ModelRef, load_model

    done = ran("export", linear, "--format", "lora", "--out", tmp_path / "lora", "--json")
    assert done.code == 0, done.err
    assert set(done.json["domains"]) == {"code", "chat"}
    for entry in done.json["domains"].values():
        assert entry["kept"] == pytest.approx(1, abs=1e-3)
        assert entry["kl"]["exported"] == pytest.approx(entry["kl"]["corrected"], rel=1e-3)
    folded = ran("export", linear, "--format", "folded", "--domain", "chat", "--out", tmp_path / "folded", "--json")
    assert folded.code == 0, folded.err
    assert folded.json["domains"]["chat"]["kept"] == pytest.approx(1, abs=1e-3)
    assert "auto_map" not in json.loads((tmp_path / "folded" / "config.json").read_text())
    for place in (tmp_path / "lora", tmp_path / "lora" / "chat", tmp_path / "folded"):
        assert "gain" in (place / "README.md").read_text()

    model, tokenizer, handle = mergedarts.load(linear, domain="chat")
    ids = prompt_ids(tokenizer, "a poem about the sea")
    with torch.no_grad():
        want = model(input_ids=ids).logits
        text = model.generate(input_ids=ids, **OPTIONS)
        plain = load_model(ModelRef(str(tmp_path / "folded")), torch.float32, model.device)
        handle.domain = None
        tuned = PeftModel.from_pretrained(load_model(ModelRef(str(world.merged)), torch.float32, model.device),
                                          tmp_path / "lora" / "chat", adapter_name="chat")  # fmt: skip
        tuned.load_adapter(tmp_path / "lora" / "code", adapter_name="code")
        for other in (plain, tuned):
            torch.testing.assert_close(other(input_ids=ids).logits, want, atol=1e-4, rtol=1e-4)
            assert other.generate(input_ids=ids, **OPTIONS).tolist() == text.tolist()
        tuned.set_adapter("code")
        handle.domain = "code"
        torch.testing.assert_close(tuned(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    settings = json.loads((tmp_path / "lora" / "chat" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "lora" / "chat" / "adapter_model.safetensors")
    assert settings["lora_alpha"] == settings["r"]
    assert {t.shape[0] for name, t in tensors.items() if "lora_A" in name} == {settings["r"]}


def test_a_correction_of_the_residual_stream_becomes_a_lora(
    world: World, repaired: tuple[Path, Ran], tmp_path: Path
) -> None:
    """Fitted to the same states: its cost is said, it is what a stranger loads, and folded and adapter agree."""
    from peft import PeftModel

    from mergedarts.models import ModelRef, load_model

    options = ("--domain", "chat", "--rank", "12", "--force", "--json")
    lora = ran("export", repaired[0], "--format", "lora", "--out", tmp_path / "lora", *options)
    assert lora.code == 0, lora.err
    folded = ran("export", repaired[0], "--format", "folded", "--out", tmp_path / "folded", *options)
    assert folded.code == 0, folded.err
    entry = lora.json["domains"]["chat"]
    assert entry["fitted"]
    assert entry["rank"] == 12
    assert entry["kl"]["exported"] < entry["kl"]["merged"]
    assert entry["kl"]["exported"] == pytest.approx(folded.json["domains"]["chat"]["kl"]["exported"], rel=1e-3)
    gain = entry["kl"]["merged"] - entry["kl"]["corrected"]
    assert entry["kept"] == pytest.approx((entry["kl"]["merged"] - entry["kl"]["exported"]) / gain)
    cpu = torch.device("cpu")
    plain = load_model(ModelRef(str(tmp_path / "folded")), torch.float32, cpu)
    tuned = PeftModel.from_pretrained(load_model(ModelRef(str(world.merged)), torch.float32, cpu), tmp_path / "lora")
    ids = torch.randint(5, 250, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=ids).logits, tuned(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_a_lora_that_keeps_too_little_is_refused(linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With most of the update taken away."""
    from mergedarts import export as exports
    from mergedarts.correction import Correction, SiteCorrection

    def less(job: Any, domain: Any, model: Any, correction: Correction, *_: Any) -> tuple[Correction, bool]:
        sites = {n: SiteCorrection("linear", s.down.data, 0.1 * s.up.data) for n, s in correction.items()}
        return Correction(sites), True

    monkeypatch.setattr(exports, "lora_of", less)
    arguments = ("export", linear, "--format", "folded", "--domain", "chat", "--out", tmp_path / "out")
    is_mistake(ran(*arguments), "keeps", "--force", "chat")
    assert list(tmp_path.iterdir()) == []
    done = ran(*arguments, "--force", "--json")
    assert done.code == 0, done.err
    assert 0 < done.json["domains"]["chat"]["kept"] < 0.5


def test_mistakes(repaired: tuple[Path, Ran], linear: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    is_mistake(ran("export", repaired[0], "--format", "hub", "--out", out, "--domain", "law"), "law", "code")
    is_mistake(ran("export", repaired[0], "--format", "folded", "--out", out), "--domain", "code")
    is_mistake(ran("export", repaired[0], "--format", "lora", "--out", out, "--domain", "auto"), "auto")
    is_mistake(ran("export", tmp_path, "--format", "hub", "--out", out), "calibrate")
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("x")
    is_mistake(ran("export", repaired[0], "--format", "hub", "--out", out), "another folder")
    assert (out / "mine.txt").read_text() == "x"


class FakeHub:
    """Remembers what was asked of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error = error

    def create_repo(self, name: str, **options: Any) -> None:
        self.calls.append(("create", {"name": name} | options))
        if self.error:
            raise self.error

    def upload_folder(self, **options: Any) -> str:
        self.calls.append(("upload", options))
        return "https://hub/commit/1"


def test_push(tmp_path: Path) -> None:
    from huggingface_hub.errors import HFValidationError

    import mergedarts
    from mergedarts.export import push

    hub = FakeHub()
    assert push(tmp_path, "me/model", hub) == "https://hub/commit/1"
    assert hub.calls[0] == ("create", {"name": "me/model", "private": True, "exist_ok": True})
    assert hub.calls[1][1]["repo_id"] == "me/model"
    assert hub.calls[1][1]["folder_path"] == str(tmp_path)
    with pytest.raises(mergedarts.UserError, match="could not be written on the hub"):
        push(tmp_path, "no good", FakeHub(HFValidationError("bad name")))
