"""Which of two answers is better: by the likelihood of a causal LM's verdict, or from an OpenAI-compatible server.

Knows the question put to a judge and how a verdict is read; knows no data set and no statistics.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any, Protocol

import torch

from ..claims import made_once
from ..errors import UserError
from ..files import cache_dir, digest_text
from ..models import ModelRef, fingerprint, load_model, load_tokenizer, pick_device

QUESTION = """Two assistants answered the same instruction. Say which answer is better: more helpful, more accurate, \
and closer to what the instruction asks for.

Instruction:
{instruction}

Answer A:
{first}

Answer B:
{second}

Reply with the letter of the better answer alone, A or B."""


class Judge(Protocol):
    """Says how likely the first of two answers is the better one."""

    name: str

    def first_is_better(self, question: str) -> float:
        """Between 0 and 1; 0.5 for a verdict that cannot be read."""


class LocalJudge:
    """A causal LM that gives its verdict by the likelihoods of the letters A and B.

    Args:
        text: the model as a user writes it.
        device: where it runs.
    """

    def __init__(self, text: str, device: str) -> None:
        ref = ModelRef.parse(text)
        self.name = f"{text} {fingerprint(ref)}"
        self._ref, self._device = ref, pick_device(device)
        self._loaded: tuple[Any, Any] | None = None

    @torch.inference_mode()
    def first_is_better(self, question: str) -> float:
        model, tokenizer = self._loaded or self._load()
        chat = bool(getattr(tokenizer, "chat_template", None))
        if chat:
            turns = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        else:
            text = f"{question}\n\nThe better answer:"
        ids = tokenizer(text, add_special_tokens=not chat, return_tensors="pt")["input_ids"].to(self._device)
        letters = [tokenizer(f"{'' if chat else ' '}{x}", add_special_tokens=False)["input_ids"][-1] for x in "AB"]
        a, b = model(input_ids=ids, use_cache=False).logits[0, -1, letters].double().log_softmax(-1).exp().tolist()
        return float(a / (a + b))

    def _load(self) -> tuple[Any, Any]:
        self._loaded = load_model(self._ref, torch.bfloat16, self._device), load_tokenizer(self._ref)
        return self._loaded


class EndpointJudge:
    """A model behind an OpenAI-compatible server, asked for one letter at temperature 0.

    The key, where the server wants one, is read from the environment variable OPENAI_API_KEY.

    Args:
        url: the base of the interface, such as http://localhost:8000/v1, and after a `#` the model's name; without
            one, the first that the server lists.
    """

    def __init__(self, url: str) -> None:
        self._base, _, model = url.rstrip("/").partition("#")
        self._model = model or str(self._ask("models")["data"][0]["id"])
        self.name = f"{self._base}#{self._model}"

    def first_is_better(self, question: str) -> float:
        body = {
            "model": self._model, "temperature": 0, "max_tokens": 4,
            "messages": [{"role": "user", "content": question}],
        }  # fmt: skip
        said = str(self._ask("chat/completions", body)["choices"][0]["message"]["content"] or "")
        letter = next((c for c in said.upper() if c in "AB"), "")
        return {"A": 1.0, "B": 0.0, "": 0.5}[letter]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self._base}/{path}", data, headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UserError(f"The judge {self._base}/{path} does not answer ({reason}); check its address.") from None


def open_judge(text: str, device: str) -> Judge:
    """The judge that a user names: an http(s) address, or a model."""
    return EndpointJudge(text) if text.startswith(("http://", "https://")) else LocalJudge(text, device)


def preference(judge: Judge, instruction: str, reference: str, output: str) -> float:
    """From 1 (the reference is better) to 2 (the output is), as alpaca_eval writes it: the mean over both orders.

    Kept on disk, so that a judge is asked once.
    """
    path = cache_dir() / "judgements" / f"{digest_text(QUESTION, judge.name, instruction, reference, output)}.checked"

    def work() -> str:
        forth = judge.first_is_better(QUESTION.format(instruction=instruction, first=output, second=reference))
        back = judge.first_is_better(QUESTION.format(instruction=instruction, first=reference, second=output))
        return json.dumps(1 + (forth + 1 - back) / 2)

    return float(json.loads(made_once(path, work)))
