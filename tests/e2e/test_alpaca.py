"""`mergedarts evaluate --alpaca-eval`: outputs, verdicts read back, and judges here, on tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from .conftest import Ran, World, is_mistake, ran, write_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": f"a poem about {w}", "response": f"the {w}"} for w in ("sea", "sky", "sun", "rain")]
    return write_lines(tmp_path_factory.mktemp("alpaca") / "instructions.jsonl", rows)


def alpaca(repaired: tuple[Path, Ran], instructions: Path, out: Path, *more: object) -> Ran:
    return ran(
        "evaluate", repaired[0], "--alpaca-eval", out, "--instructions", instructions, "--route", "alpaca_eval=chat",
        "--max-new-tokens", 8, *more,
    )  # fmt: skip


def test_outputs_for_alpaca_eval_are_what_the_models_say(
    world: World, repaired: tuple[Path, Ran], instructions: Path, tmp_path: Path
) -> None:
    done = alpaca(repaired, instructions, tmp_path / "o.json")
    assert done.code == 0, done.err
    for name, domain in (("o.json", "chat"), ("o.merged.json", "none")):
        assert str(tmp_path / name) in done.out
        for row in json.loads((tmp_path / name).read_text()):
            said = ran(
                "generate", repaired[0], "--domain", domain, "--prompt", row["instruction"], "--max-new-tokens", 8,
                "--json",
            )  # fmt: skip
            assert said.json["text"].strip() == row["output"]
    assert len(json.loads((tmp_path / "o.expert.json").read_text())) == 4


def test_verdicts_of_alpaca_eval_come_back_into_the_table(
    repaired: tuple[Path, Ran], instructions: Path, tmp_path: Path
) -> None:
    assert alpaca(repaired, instructions, tmp_path / "o.json").code == 0
    given = []
    for model, name, values in (
        ("repaired", "o.json", (2, 2, 2, 1)), ("merged", "o.merged.json", (1, 1, 2, 1)),
        ("expert", "o.expert.json", (2, 2, 2, 2)),
    ):  # fmt: skip
        rows = json.loads((tmp_path / name).read_text())
        verdicts = [
            {"instruction": r["instruction"], "output_1": "x", "output_2": r["output"], "preference": v}
            for r, v in zip(rows, values, strict=True)
        ]
        (tmp_path / f"{model}.json").write_text(json.dumps(verdicts))
        given.append(f"{model}={tmp_path / f'{model}.json'}")
    done = alpaca(repaired, instructions, tmp_path / "o.json", "--annotations", ",".join(given), "--json")
    assert done.code == 0, done.err
    row = done.json["rows"][-1]
    assert (row["task"], row["metric"]) == ("alpaca_eval", "win rate")
    assert (row["comparison"]["merged"], row["comparison"]["repaired"], row["comparison"]["expert"]) == (0.25, 0.75, 1)
    assert row["comparison"]["test"]["p"] == pytest.approx(0.5)  # two gained, none lost
    stale = alpaca(repaired, instructions, tmp_path / "o.json", "--annotations", ",".join(given), "--limit", 3)
    assert stale.code == 0
    text = (tmp_path / "merged.json").read_text()
    (tmp_path / "merged.json").write_text(text.replace('"output_2": "', '"output_2": "other '))
    stale = alpaca(repaired, instructions, tmp_path / "o.json", "--annotations", ",".join(given))
    is_mistake(stale, "merged.json", "judge the outputs again")


def test_a_local_judge(world: World, repaired: tuple[Path, Ran], instructions: Path, tmp_path: Path) -> None:
    """Its verdicts by plain forward passes, in both orders."""
    from mergedarts.evaluation.judge import QUESTION
    from mergedarts.models import ModelRef, load_model, load_tokenizer

    done = alpaca(repaired, instructions, tmp_path / "o.json", "--judge", world.base, "--json", "--device", "cpu")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "o.annotations.json").read_text())
    ref = ModelRef.parse(str(world.base))
    model, tokenizer = load_model(ref, torch.bfloat16, torch.device("cpu")), load_tokenizer(ref)
    letters = [tokenizer(x)["input_ids"][0] for x in "AB"]

    def first(instruction: str, one: str, two: str) -> float:
        text = QUESTION.format(instruction=instruction, first=one, second=two)
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        with torch.no_grad():
            logits = model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1].double()
        a, b = logits[letters].tolist()
        return 1 / (1 + math.exp(b - a))

    for row in found:
        ours, theirs = row["output_2"], row["output_1"]
        expected = 1 + (first(row["instruction"], ours, theirs) + 1 - first(row["instruction"], theirs, ours)) / 2
        assert row["preference"] == pytest.approx(expected, abs=1e-6)
        assert theirs.startswith("the ")
    assert done.json["rows"][0]["comparison"]["repaired"] == pytest.approx(
        sum(row["preference"] - 1 for row in found) / 4
    )


def test_a_server_judges(repaired: tuple[Path, Ran], instructions: Path, tmp_path: Path) -> None:
    """An OpenAI-compatible server that likes answer A whatever it says: both orders make that a draw."""
    import http.server
    import threading

    class Server(http.server.BaseHTTPRequestHandler):
        def _say(self, data: Any) -> None:
            body = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._say({"data": [{"id": "the-judge"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (asked["model"], asked["temperature"]) == ("the-judge", 0)
            self._say({"choices": [{"message": {"content": "A"}}]})

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = alpaca(repaired, instructions, tmp_path / "o.json", "--judge", url, "--json")
    finally:
        server.shutdown()
    assert done.code == 0, done.err
    assert [row["preference"] for row in json.loads((tmp_path / "o.annotations.json").read_text())] == [1.5] * 4
    assert done.json["rows"][0]["comparison"]["repaired"] == 0.5
