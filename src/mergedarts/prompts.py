"""Prompts to token sequences: read the examples, apply the chat template, mark which tokens are the response's.

Knows files, data sets and tokenizers; the continuation an expert writes is made in `features`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .config import DatasetPrompts, Domain
from .errors import UserError
from .files import digest_text, is_file

MAX_FILE_BYTES = 1 << 30
MAX_CHARACTERS = 400_000


@dataclass(frozen=True)
class Example:
    """One calibration example: the turns of a conversation, the last of them the prompt or the response to it."""

    turns: tuple[tuple[str, str], ...]

    @property
    def has_response(self) -> bool:
        return self.turns[-1][0] == "assistant"


@dataclass(frozen=True)
class TokenSequence:
    """Token ids of one example, and which positions predict a token of a response.

    Attributes:
        ids: [T] token ids.
        predicts: [T] booleans; true at t where token t + 1 belongs to a response (its end-of-turn token included).
    """

    ids: tuple[int, ...]
    predicts: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class PromptSet:
    """The sequences of one domain; `digest` depends on ids and marks alone."""

    sequences: tuple[TokenSequence, ...]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        parts = [f"{s.ids}{''.join('01'[p] for p in s.predicts)}" for s in self.sequences]
        object.__setattr__(self, "digest", digest_text(*parts))

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.sequences)

    def length(self, index: int) -> int:
        """Tokens of one sequence."""
        return len(self.sequences[index])

    @property
    def offsets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[N + 1] where each sequence begins in the flat token order."""
        return np.concatenate([[0], np.cumsum([len(s) for s in self.sequences])]).astype(np.int64)

    def positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[tokens] positions counted from the first token of each sequence."""
        return np.concatenate([np.arange(len(s)) for s in self.sequences])

    def predicts(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[tokens] whether the next token belongs to a response."""
        return np.concatenate([np.array(s.predicts, dtype=bool) for s in self.sequences])

    def next_ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[tokens] the token that follows; -1 at the end of a sequence."""
        return np.concatenate([np.array([*s.ids[1:], -1]) for s in self.sequences])

    def sequence_index(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[tokens] the number of the sequence each token is from."""
        return np.repeat(np.arange(len(self.sequences)), [len(s) for s in self.sequences])

    def subset(self, chosen: SequenceOf[int]) -> PromptSet:
        return PromptSet(tuple(self.sequences[i] for i in chosen))


def split(count: int, holdout: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the sequences to fit on and of those held out, at least one of each where `holdout` is above 0."""
    if holdout == 0 or count == 0:
        return list(range(count)), []
    if count < 2:
        raise UserError("One prompt leaves nothing to hold out; give at least two, or set 'fit.holdout: 0'.")
    held = min(max(1, round(count * holdout)), count - 1)
    order = np.random.default_rng(seed).permutation(count).tolist()
    return sorted(order[held:]), sorted(order[:held])


def read_examples(domain: Domain, name: str, base: Path) -> list[Example]:
    """The first `samples` examples of a domain; none where it has no prompts.

    Raises:
        UserError: the file is missing, empty, too large, or a line is not an example; names file and line.
    """
    if domain.prompts is None:
        return []
    if isinstance(domain.prompts, DatasetPrompts):
        return _from_dataset(domain.prompts, domain.samples)
    path = Path(domain.prompts).expanduser()
    path = path if path.is_absolute() else base / path
    if not is_file(path):
        raise UserError(f"The prompts of domain '{name}' are missing: {path} is not a file.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UserError(f"{path} is larger than 1 GiB; cut it to the prompts you calibrate with.")
    examples: list[Example] = []
    json_lines = path.suffix.lower() in (".jsonl", ".json", ".ndjson")
    try:
        with path.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                if len(examples) == domain.samples:
                    break
                if line.strip():
                    where = f"{path}, line {number}"
                    examples.append(_from_json(line, where) if json_lines else _example(line.strip(), None, where))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text.") from None
    if not examples:
        raise UserError(f"{path} holds no prompts.")
    return examples


def _from_json(line: str, where: str) -> Example:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({str(error).splitlines()[0]}).") from None
    if isinstance(data, str):
        return _example(data, None, where)
    if not isinstance(data, dict) or not {"prompt", "messages"} & set(data):
        raise UserError(f"{where}: an example needs 'prompt' (and optionally 'response'), or 'messages'.")
    if "messages" in data:
        return _conversation(data["messages"], where)
    return _example(data["prompt"], data.get("response"), where)


def _example(prompt: Any, response: Any, where: str) -> Example:
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{where}: the prompt is empty or not text.")
    if response is not None and not isinstance(response, str):
        raise UserError(f"{where}: the response is not text.")
    turns = [("user", prompt)]
    if response is not None and response.strip():
        turns.append(("assistant", response))
    return _checked(turns, where)


def _conversation(messages: Any, where: str) -> Example:
    valid = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") in ("system", "user", "assistant")
        for m in messages
    )
    if not valid or not any(m["role"] == "user" for m in messages):
        raise UserError(f"{where}: 'messages' must be a list of roles (system, user, assistant) with text 'content'.")
    return _checked([(m["role"], m["content"]) for m in messages], where)


def _checked(turns: list[tuple[str, str]], where: str) -> Example:
    for _, text in turns:
        check_text(text, where)
    if sum(len(text) for _, text in turns) > MAX_CHARACTERS:
        raise UserError(f"{where}: an example of more than {MAX_CHARACTERS} characters; cut it.")
    return Example(tuple(turns))


def check_text(text: str, where: str) -> None:
    """Raise `UserError` where a text is not Unicode that a tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: the text is not valid Unicode (a lone surrogate or broken UTF-8).") from None


def _from_dataset(source: DatasetPrompts, samples: int) -> list[Example]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"The data set {source.dataset} needs the extra 'datasets'; pip install 'mergedarts[datasets]'."
        ) from None
    try:
        rows = load_dataset(source.dataset, source.config, split=source.split, streaming=True)
        examples = []
        for row in rows.take(samples):
            response = row[source.response_column] if source.response_column else None
            examples.append(_example(row[source.column], response, f"data set {source.dataset}"))
    except KeyError as error:
        raise UserError(f"The data set {source.dataset} has no column {error}.") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"The data set {source.dataset} cannot be read ({str(error).splitlines()[0][:160]}).") from None
    if not examples:
        raise UserError(f"The data set {source.dataset} holds no rows in split '{source.split}'.")
    return examples


def encode(examples: list[Example], tokenizer: Any, eos: set[int], max_tokens: int) -> list[TokenSequence]:
    """Token sequences of examples, each with its generation prompt, cut to `max_tokens`.

    With a chat template, turns are rendered by it; without one, they are joined as plain text. The text that the
    template puts between a user's turn and the assistant's answer counts as prompt, and so does every user turn.
    """
    return [_encode(example, tokenizer, eos, max_tokens) for example in examples]


def _encode(example: Example, tokenizer: Any, eos: set[int], max_tokens: int) -> TokenSequence:
    ids: list[int] = []
    response: list[bool] = []
    for text, is_response in _segments(example, tokenizer):
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        if is_response:
            # A template may write more after the end of the turn; the model is not asked for that.
            end = next((i for i, token in enumerate(new) if token in eos), len(new) - 1) + 1
            response += [True] * end + [False] * (len(new) - end)
        else:
            response += [False] * len(new)
        ids += new
    # The end of the last response ends the sequence.
    if example.has_response and any(response):
        last = len(response) - 1 - response[::-1].index(True)
        ids, response = ids[: last + 1], response[: last + 1]
    if not getattr(tokenizer, "chat_template", None) and tokenizer.bos_token_id is not None and _adds_bos(tokenizer):
        ids, response = [tokenizer.bos_token_id, *ids], [False, *response]
    ids, response = ids[:max_tokens], response[:max_tokens]
    if not ids:
        raise UserError(f"The prompt {example.turns[0][1][:40]!r} gives no tokens; take it out.")
    return TokenSequence(tuple(ids), (*response[1:], False))


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def _segments(example: Example, tokenizer: Any) -> list[tuple[str, bool]]:
    """The rendered text in pieces, each with whether an assistant would write it."""
    if not getattr(tokenizer, "chat_template", None):
        pieces = [(text, role == "assistant") for role, text in example.turns]
        return [*pieces, (tokenizer.eos_token or "", True)] if example.has_response else pieces

    def render(count: int, generation: bool) -> str:
        messages = [{"role": role, "content": text} for role, text in example.turns[:count]]
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation))
        except Exception as error:  # jinja raises whatever the template's author chose
            raise UserError(f"The chat template refuses an example ({str(error).splitlines()[0][:120]}).") from error

    segments: list[tuple[str, bool]] = []
    done = ""
    for i, (role, text) in enumerate(example.turns):
        last = i + 1 == len(example.turns)
        if role == "assistant":
            before, after = render(i, True), render(i + 1, False)
            if not before.startswith(done):
                raise UserError("The chat template rewrites earlier turns; give single-turn prompts for this model.")
            segments.append((before[len(done) :], False))
            if after.startswith(before):
                segments.append((after[len(before) :], True))
                done = after
            elif last:
                # The template renders a finished answer otherwise than a fresh one: take what a user would see.
                segments.append((text + (tokenizer.eos_token or ""), True))
            else:
                raise UserError("The chat template rewrites earlier turns; give single-turn prompts for this model.")
        elif last:
            segments.append((render(i + 1, True)[len(done) :], False))
    return segments


def with_continuation(sequence: TokenSequence, continuation: list[int]) -> TokenSequence:
    """A prompt-only sequence followed by what an expert wrote after it."""
    if not continuation:
        return sequence
    predicts = (*sequence.predicts[:-1], *[True] * len(continuation), False)
    return TokenSequence((*sequence.ids, *continuation), predicts)


def check_tokenizer(examples: list[Example], ours: Any, theirs: Any, merged: str, expert: str) -> None:
    """Raise `UserError` where an expert's tokenizer reads the calibration text otherwise than the merged model's.

    The text is what the merged model's template makes of the examples; templates may differ, token ids may not.
    """
    for example in examples:
        for text, _ in _segments(example, ours):
            if ours(text, add_special_tokens=False)["input_ids"] != theirs(text, add_special_tokens=False)["input_ids"]:
                raise UserError(
                    f"The tokenizer of the expert {expert} encodes the calibration text to other ids than that of the "
                    f"merged model {merged}; they must share a tokenizer."
                )
