"""Prompts to token sequences, against strings put together by hand, and the sentence of every mistake."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mergedarts.config import Domain
from mergedarts.errors import UserError
from mergedarts.prompts import (
    MAX_CHARACTERS,
    Example,
    PromptSet,
    TokenSequence,
    check_tokenizer,
    encode,
    read_examples,
    split,
    with_continuation,
)
from tests.tiny import prompt_set

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Trims texts and drops what an assistant thought in earlier turns, as some templates do.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML


def tokenizer(template=CHATML, bos=False):
    """One token a byte, and three special ones."""
    specials = ["<|im_start|>", "<|im_end|>", "<s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate([*specials, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(specials)
    if bos:
        from tokenizers.processors import TemplateProcessing

        made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    out = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", bos_token="<s>" if bos else None)
    out.chat_template = template
    return out


def ids_of(text):
    """Token ids of a text, without the tokenizer under test: specials first, then one id a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {}
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = 0
    for b in range(256):
        if b in kept:
            order[b] = 3 + alphabet.index(chr(b))
        else:
            order[b] = 3 + alphabet.index(chr(256 + extra))
            extra += 1
    specials = {"<|im_start|>": 0, "<|im_end|>": 1, "<s>": 2}
    out = []
    while text:
        found = next((s for s in specials if text.startswith(s)), None)
        if found:
            out.append(specials[found])
            text = text[len(found) :]
        else:
            out += [order[b] for b in text[0].encode()]
            text = text[1:]
    return out


def expected(*pieces):
    """A sequence from (text, is_response) pieces: a token predicts where the next one is of a response."""
    ids, response = [], []
    for text, mine in pieces:
        new = ids_of(text)
        ids += new
        response += [mine] * len(new)
    return TokenSequence(tuple(ids), tuple([*response[1:], False]))


def encoded(*turns, template=CHATML, eos=(1,), max_tokens=1000, bos=False):
    return encode([Example(tuple(turns))], tokenizer(template, bos), set(eos), max_tokens)[0]


def test_prompt_and_response():
    """The end-of-turn token is the response's; the newline that the template writes after it is not there."""
    got = encoded(("user", "Hi"), ("assistant", "Yes."))
    assert got == expected(("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False), ("Yes.<|im_end|>", True))
    assert got.ids[-1] == 1
    assert sum(got.predicts) == 5


def test_prompt_alone_ends_with_the_generation_prompt():
    got = encoded(("user", "Hé"))
    assert got == expected(("<|im_start|>user\nHé<|im_end|>\n<|im_start|>assistant\n", False))
    assert not any(got.predicts)


def test_several_turns():
    """Every user turn is prompt and every assistant turn response, each with its end of turn."""
    got = encoded(
        ("system", "Be brief"), ("user", "A?"), ("assistant", "a"), ("user", "B?"), ("assistant", "bb")
    )  # fmt: skip
    assert got == expected(
        ("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n", False),
        ("a<|im_end|>", True),
        ("\n<|im_start|>user\nB?<|im_end|>\n<|im_start|>assistant\n", False),
        ("bb<|im_end|>", True),
    )


def test_several_turns_that_end_with_a_user():
    got = encoded(("user", "A?"), ("assistant", "a"), ("user", "B?"))
    assert got == expected(
        ("<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n", False),
        ("a<|im_end|>", True),
        ("\n<|im_start|>user\nB?<|im_end|>\n<|im_start|>assistant\n", False),
    )


def test_end_of_turn_inside_a_response_ends_what_is_asked_for():
    """Where the stop set does not know the template's end of turn, the rest of the turn is the response's too."""
    got = encoded(("user", "Hi"), ("assistant", "Yes"), eos=())
    assert got == expected(
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False), ("Yes<|im_end|>\n", True)
    )


def test_a_template_that_opens_a_thought():
    """A finished answer is rendered otherwise than a fresh one: the answer follows what a model would really see."""
    got = encoded(("user", "Hi"), ("assistant", "Yes"), template=THINKING)
    assert got == expected(
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>", False), ("Yes<|im_end|>", True)
    )


def test_a_template_that_rewrites_earlier_turns_is_said():
    with pytest.raises(UserError, match="rewrites earlier turns"):
        encoded(
            ("user", "A"), ("assistant", "<think>hm</think>a"), ("user", "B"), ("assistant", "b"), template=THINKING
        )


def test_a_template_that_refuses_is_said():
    with pytest.raises(UserError, match="template refuses an example .*no system here"):
        encoded(("system", "x"), ("user", "A"), template=STRICT)


@pytest.mark.parametrize("bos", [False, True])
def test_without_a_template_turns_are_joined(bos):
    got = encoded(("user", "Hi "), ("assistant", "Yes"), template=None, bos=bos)
    assert got == expected(("<s>" if bos else "", False), ("Hi ", False), ("Yes<|im_end|>", True))
    assert encoded(("user", "Hi"), template=None, bos=bos) == expected(("<s>" if bos else "", False), ("Hi", False))


def test_the_template_writes_its_own_beginning():
    """A tokenizer that adds <s> by itself does not add a second one to a template's text."""
    got = encoded(("user", "Hi"), template="<s>" + CHATML, bos=True)
    assert got.ids.count(2) == 1


@pytest.mark.parametrize("cut", [1, 5, 33, 34, 36, 38, 100])
def test_truncation_at_the_end(cut):
    whole = expected(("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False), ("Yes.<|im_end|>", True))
    got = encoded(("user", "Hi"), ("assistant", "Yes."), max_tokens=cut)
    assert got.ids == whole.ids[:cut]
    # A mark says what the next token is, so the last of a cut sequence marks nothing.
    assert got.predicts == (*whole.predicts[: min(cut, len(whole)) - 1], False)


def test_an_example_without_tokens_is_said():
    tok = tokenizer(None)
    tok.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Replace("x", "")
    with pytest.raises(UserError, match="gives no tokens"):
        encode([Example((("user", "xxx"),))], tok, {1}, 10)


# --------------------------------------------------------------------------------------------------------- files


def write(tmp_path, text, name="p.jsonl"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path, samples=50, base=None):
    return read_examples(Domain(expert="e", prompts=str(path), samples=samples), "code", base or path.parent)


def test_json_lines(tmp_path):
    lines = [
        {"prompt": "a"},
        {"prompt": "b", "response": "B"},
        {"prompt": "c", "response": "  "},
        "d",
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "e"}]},
        {"messages": [{"role": "user", "content": "f"}, {"role": "assistant", "content": "F"}], "prompt": "not this"},
    ]
    got = read(write(tmp_path, "\n\n".join(json.dumps(line) for line in lines) + "\n"))
    assert [e.turns for e in got] == [
        (("user", "a"),),
        (("user", "b"), ("assistant", "B")),
        (("user", "c"),),
        (("user", "d"),),
        (("system", "s"), ("user", "e")),
        (("user", "f"), ("assistant", "F")),
    ]
    assert [e.has_response for e in got] == [False, True, False, False, False, True]


def test_plain_text(tmp_path):
    """One prompt a line, blank lines left out; a line that looks like JSON is text."""
    got = read(write(tmp_path, 'one\n\n  two  \r\n{"prompt": "x"}', "p.txt"))
    assert [e.turns[0][1] for e in got] == ["one", "two", '{"prompt": "x"}']


def test_the_first_samples_are_taken_and_the_rest_is_not_read(tmp_path):
    got = read(write(tmp_path, '"a"\n"b"\nnot json\n'), samples=2)
    assert [e.turns[0][1] for e in got] == ["a", "b"]


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path):
    """Files from Windows editors begin with one."""
    assert read(write(tmp_path, b"\xef\xbb\xbfone\ntwo", "p.txt"))[0].turns[0][1] == "one"
    assert read(write(tmp_path, b'\xef\xbb\xbf"one"'))[0].turns[0][1] == "one"


def test_paths_are_relative_to_the_run_file(tmp_path, monkeypatch):
    write(tmp_path, '"a"')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read("p.jsonl", base=tmp_path)[0].turns == (("user", "a"),)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/p.jsonl", base=tmp_path / "elsewhere")[0].turns == (("user", "a"),)


USER = {"role": "user", "content": "a"}
BAD_LINES = {
    "not JSON": ("{prompt: a}", "not valid JSON"),
    "deep nesting": ("[" * 100_000, "not valid JSON"),
    "a number": ("5", "needs 'prompt'"),
    "null": ("null", "needs 'prompt'"),
    "a list": ('["a"]', "needs 'prompt'"),
    "other keys": ('{"text": "a"}', "needs 'prompt'"),
    "empty prompt": ('{"prompt": "  "}', "prompt is empty or not text"),
    "empty string": ('""', "prompt is empty or not text"),
    "prompt is null": ('{"prompt": null}', "prompt is empty or not text"),
    "prompt is a number": ('{"prompt": 3}', "prompt is empty or not text"),
    "response is a number": ('{"prompt": "a", "response": 3}', "response is not text"),
    "messages is text": ('{"messages": "a"}', "'messages' must be"),
    "no messages": ('{"messages": []}', "'messages' must be"),
    "no user": (json.dumps({"messages": [{"role": "system", "content": "s"}]}), "'messages' must be"),
    "role": (json.dumps({"messages": [USER, {"role": "tool", "content": "s"}]}), "'messages' must be"),
    "no content": (json.dumps({"messages": [USER, {"role": "assistant"}]}), "'messages' must be"),
    "content in parts": (
        json.dumps({"messages": [{"role": "user", "content": [{"text": "a"}]}]}),
        "'messages' must be",
    ),
    "message is text": ('{"messages": ["a"]}', "'messages' must be"),
    "role is a list": (json.dumps({"messages": [{"role": [], "content": "s"}]}), "'messages' must be"),
    "too long": (json.dumps({"prompt": "a" * (MAX_CHARACTERS + 1)}), "more than 400000 characters"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_said_with_file_and_line(name, tmp_path):
    line, sentence = BAD_LINES[name]
    path = write(tmp_path, f'"fine"\n\n{line}\n')
    with pytest.raises(UserError, match=sentence) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert len(str(caught.value)) < 600


def test_bad_files_are_said(tmp_path):
    with pytest.raises(UserError, match=r"prompts of domain 'code' are missing: .*gone.jsonl"):
        read(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match="is not a file"):
        read(tmp_path)
    for text in ("", "\n \n"):
        with pytest.raises(UserError, match=r"p.jsonl holds no prompts"):
            read(write(tmp_path, text))
    with pytest.raises(UserError, match="not UTF-8"):
        read(write(tmp_path, b"\xff\xfe\x00", "p.txt"))
    huge = write(tmp_path, "", "huge.txt")
    with huge.open("wb") as stream:
        stream.truncate((1 << 30) + 1)  # a sparse file, no bytes on disk
    with pytest.raises(UserError, match="huge.txt is larger than 1 GiB"):
        read(huge)


def test_half_a_surrogate_pair_is_said(tmp_path):
    """JSON may hold what is no text; it is said with its line, or read as something, and never a traceback."""
    path = write(tmp_path, '"a \\ud800 b"\n')
    try:
        got = read(path)
        PromptSet(tuple(encode(got, tokenizer(), {1}, 100)))
    except UserError as error:
        assert "line 1" in str(error)  # noqa: PT017 - either way is right, but not a third one


# ------------------------------------------------------------------------------------------------------ sequences


def test_flat_order():
    prompts = prompt_set((3, 1, 4), response=1)
    assert prompts.tokens == 8
    assert prompts.offsets.tolist() == [0, 3, 4, 8]
    assert prompts.positions().tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert prompts.sequence_index().tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    a, b, c = (s.ids for s in prompts.sequences)
    assert prompts.next_ids().tolist() == [a[1], a[2], -1, -1, c[1], c[2], c[3], -1]
    assert prompts.predicts().tolist() == [False, True, False, False, False, False, True, False]
    assert [s.ids for s in prompts.subset([2, 0]).sequences] == [c, a]
    assert b


def test_continuation():
    base = TokenSequence((5, 6, 7), (False, False, False))
    got = with_continuation(base, [8, 9])
    assert got.ids == (5, 6, 7, 8, 9)
    assert got.predicts == (False, False, True, True, False)
    assert with_continuation(base, []) is base


def test_continuation_keeps_earlier_responses():
    """A conversation that ends with a user: what the assistant said before stays a response."""
    base = TokenSequence((5, 6, 7, 8), (False, True, False, False))
    assert with_continuation(base, [9]).predicts == (False, True, False, True, False)


@pytest.mark.parametrize(
    ("count", "holdout", "held"), [(10, 0.2, 2), (2, 0.2, 1), (2, 0.9, 1), (7, 0.5, 4), (50, 0.01, 1)]
)
def test_split(count, holdout, held):
    fitted, out = split(count, holdout, 0)
    assert sorted(fitted + out) == list(range(count))
    assert len(out) == held
    assert (fitted, out) == split(count, holdout, 0)
    assert fitted == sorted(fitted)


def test_split_depends_on_the_seed_and_needs_two():
    assert len({tuple(split(20, 0.2, s)[1]) for s in range(6)}) > 1
    assert split(3, 0, 0) == ([0, 1, 2], [])
    with pytest.raises(UserError, match="at least two"):
        split(1, 0.2, 0)


def test_tokenizers_that_differ_are_said():
    examples = [Example((("user", "abc"),))]
    check_tokenizer(examples, tokenizer(), tokenizer(None), "m", "e")  # templates may differ
    other = tokenizer()
    other.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Lowercase()
    check_tokenizer(examples, tokenizer(), other, "m", "e")
    with pytest.raises(UserError, match="expert the-expert .* merged model the-merge"):
        check_tokenizer([Example((("user", "ABC"),))], tokenizer(), other, "the-merge", "the-expert")
