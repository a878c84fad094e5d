"""The run file: presets, short forms, and the sentence of every mistake with its file, line and key."""

from __future__ import annotations

import time

import pytest

from mergedarts.config import PRESETS, load_yaml, parse_run, read_run_file
from mergedarts.errors import UserError

GOOD = """\
merged: ./merged
domains:
  code:
    expert: a/b
    prompts: code.jsonl
  maths:
    expert: a/c
    prompts: {dataset: gsm8k, column: question, response_column: answer, config: main}
    samples: 20
"""


def write(tmp_path, text, name="darts.yml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def run(tmp_path, extra="", overrides=None):
    return read_run_file(write(tmp_path, GOOD + extra), overrides)


def test_a_good_file(tmp_path):
    got = run(tmp_path)
    assert got.merged == "./merged"
    assert list(got.domains) == ["code", "maths"]
    assert got.domains["code"].prompts == "code.jsonl"
    assert got.domains["maths"].prompts.response_column == "answer"
    assert (got.domains["code"].samples, got.domains["maths"].samples) == (50, 20)
    assert got.budget == 0.001


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1%", 0.001),
        ("'0.1%'", 0.001),
        ("' 2 %'", 0.02),
        ("0.003", 0.003),
        ("100%", 1.0),
        ("1", 1.0),
        ("1e-4%", 1e-6),
    ],
)
def test_budget(tmp_path, text, value):
    assert run(tmp_path, f"budget: {text}\n").budget == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "form", "size"),
    [
        ("position: none", "none", 0),
        ("position: constant", "constant", 0),
        ("position: {smooth: 8}", "smooth", 8),
        ("position: {table: 512}", "table", 512),
        ("positions: 7", "table", 7),
        ("position: {form: smooth, size: 4}", "smooth", 4),
    ],
)
def test_position_forms(tmp_path, text, form, size):
    got = run(tmp_path, f"correction: {{{text}}}\n").correction.position_form
    assert (got.form, got.size) == (form, size)


def test_position_left_open(tmp_path):
    assert run(tmp_path).correction.position_form is None


def test_the_papers_preset(tmp_path):
    """What method.md says of the paper: rank 16, 512 rows, final site, Adam 1e-3, 500 steps, EWL1 on all tokens."""
    got = run(tmp_path, "preset: paper\n")
    c, f = got.correction, got.fit
    assert (c.sites, c.rank, c.position_form.form, c.position_form.size) == ("final", 16, "table", 512)
    assert (f.method, f.loss, f.lr, f.steps, f.prompt_weight) == ("adam", "ewl1", 1e-3, 500, 1.0)


def test_surgerys_preset(tmp_path):
    got = run(tmp_path, "preset: surgery\n")
    c, f = got.correction, got.fit
    assert (c.sites, c.rank, c.position_form.form, f.method, f.loss) == ("final", 16, "none", "adam", "l1")


@pytest.mark.parametrize("position", ["positions: 9", "position: {table: 9}"])
def test_the_file_wins_over_the_preset(tmp_path, position):
    got = run(tmp_path, f"preset: paper\ncorrection: {{rank: 4, {position}}}\nfit: {{steps: 7, seed: 3}}\n")
    assert (got.correction.rank, got.correction.sites, got.correction.position_form.size) == (4, "final", 9)
    assert (got.fit.steps, got.fit.method, got.fit.seed) == (7, "adam", 3)
    assert PRESETS["paper"]["correction"]["rank"] == 16


def test_overrides_win_and_none_is_left_out(tmp_path):
    got = run(tmp_path, "budget: 0.1%\ndevice: cpu\n", {"budget": "1%", "device": None, "preset": "surgery"})
    assert (got.budget, got.device, got.preset, got.fit.loss) == (0.01, "cpu", "surgery", "l1")


#: name: (text after the good file, or whole file with a leading '!', line, words of the sentence)
MISTAKES = {
    "unknown key": ("bugdet: 1\n", 10, ["unknown key 'bugdet'", "budget"]),
    "unknown key of a domain": (
        "!merged: m\ndomains:\n  code:\n    expert: e\n    prompts: p\n    sampels: 3\n",
        6,
        ["unknown key 'domains.code.sampels'", "samples"],
    ),
    "unknown key of fit": ("fit:\n  seed: 1\n  step: 5\n", 12, ["unknown key 'fit.step'", "steps"]),
    "unknown key of correction": ("correction: {ranks: 5}\n", 10, ["unknown key 'correction.ranks'", "rank"]),
    "unknown key of prompts": (
        "!merged: m\ndomains:\n  code:\n    expert: e\n    prompts:\n      dataset: d\n      column: c\n      row: 3\n",
        8,
        ["row"],
    ),
    "key given twice": ("merged: other\n", 10, ["key 'merged' is given twice", "line 1"]),
    "domain given twice": (
        "!merged: m\ndomains:\n  code: {expert: e, prompts: p}\n  code: {expert: f, prompts: p}\n",
        4,
        ["domain 'code' is given twice", "line 3"],
    ),
    "key of a domain given twice": (
        "!merged: m\ndomains:\n  code:\n    expert: e\n    expert: f\n    prompts: p\n",
        5,
        ["key 'expert' is given twice", "line 4"],
    ),
    "no expert": ("!merged: m\ndomains:\n  code:\n    prompts: p\n", 3, ["'domains.code.expert' is missing"]),
    "no domains": ("!merged: m\n", None, ["'domains' is missing"]),
    "empty domains": ("!merged: m\ndomains: {}\n", 2, ["'domains' is empty"]),
    "domains is a list": ("!merged: m\ndomains: [a]\n", 2, ["'domains'"]),
    "domain is text": ("!merged: m\ndomains:\n  code: x\n", 3, ["'domains.code'"]),
    "bad name": ("!merged: m\ndomains:\n  'a b': {expert: e, prompts: p}\n", 2, ["'a b' cannot name a domain"]),
    "reserved name": ("!merged: m\ndomains:\n  none: {expert: e, prompts: p}\n", 2, ["'none' cannot name a domain"]),
    "no model": ("!domains:\n  code: {expert: e, prompts: p}\n", None, ["'merged'", "'merge'"]),
    "two models": ("merge: other.yml\n", None, ["'merged'", "'merge'"]),
    "samples 0": (
        "!merged: m\ndomains:\n  code:\n    expert: e\n    prompts: p\n    samples: 0\n",
        6,
        ["'domains.code.samples' is 0"],
    ),
    "samples is text": (
        "!merged: m\ndomains:\n  code:\n    expert: e\n    prompts: p\n    samples: many\n",
        6,
        ["'domains.code.samples' is 'many'"],
    ),
    "budget 0": ("budget: 0\n", 10, ["'budget' is 0"]),
    "budget above all": ("budget: 150%\n", 10, ["'budget'"]),
    "budget is text": ("budget: small%\n", 10, ["'budget' is 'small%'"]),
    "budget nan": ("budget: .nan\n", 10, ["'budget'"]),
    "unknown preset": ("preset: best\n", 10, ["'preset' is 'best'", "paper"]),
    "preset is a list": ("preset: [paper]\n", 10, ["'preset'"]),
    "preset is a mapping": ("preset: {paper: 1}\n", 10, ["'preset'"]),
    "dtype": ("dtype: int8\n", 10, ["'dtype' is 'int8'", "bfloat16"]),
    "rank 0": ("correction:\n  rank: 0\n", 11, ["'correction.rank' is 0"]),
    "rank is text": ("correction: {rank: big}\n", 10, ["'correction.rank' is 'big'", "full"]),
    "sites": ("correction:\n  sites: some\n", 11, ["'correction.sites' is 'some'", "final"]),
    "site is text": ("correction:\n  sites: [1, two]\n", 11, ["'correction.sites", "two"]),
    "every 0": ("correction:\n  sites: {every: 0}\n", 11, ["'correction.sites", "'every': 0"]),
    "smooth 0": ("correction:\n  position: {smooth: 0}\n", 11, ["size of at least 1"]),
    "smooth without size": ("correction:\n  position: smooth\n", 11, ["position"]),
    "two positions": ("correction:\n  positions: 3\n  position: none\n", 10, ["give one of them"]),
    "fit is text": ("fit: fast\n", 10, ["'fit' is 'fast'"]),
    "method": ("fit: {method: sgd}\n", 10, ["'fit.method' is 'sgd'", "adam"]),
    "holdout 1": ("fit: {holdout: 1}\n", 10, ["'fit.holdout' is 1"]),
    "negative ridge": ("fit: {ridge: -1}\n", 10, ["'fit.ridge' is -1"]),
    "endless ridge": ("fit: {ridge: .inf}\n", 10, ["'fit.ridge'"]),
    "ridge is no number": ("fit: {ridge: .nan}\n", 10, ["'fit.ridge'"]),
    "endless lr": ("fit: {lr: .inf}\n", 10, ["'fit.lr'"]),
    "gamma": ("fit: {gamma: 5}\n", 10, ["'fit.gamma' is 5"]),
    "adam in depth": ("fit: {method: adam}\ncorrection: {sites: all}\n", None, ["adam", "final site only"]),
    "adam smooth": ("fit: {method: adam}\ncorrection: {position: {smooth: 3}}\n", None, ["adam", "position"]),
    "adam full": ("fit: {method: adam}\ncorrection: {rank: full}\n", None, ["rank: full"]),
    "kl in depth": ("fit: {objective: kl}\ncorrection: {sites: all}\n", None, ["objective: kl", "sites: final"]),
    "not YAML": ("fit: {steps: 3\n", 11, ["not valid YAML"]),
    "tab": ("fit:\n\tsteps: 3\n", 11, ["not valid YAML"]),
    "unknown alias": ("budget: *b\n", 10, ["not valid YAML"]),
    "python object": ("device: !!python/object/apply:os.system ['true']\n", 10, ["not valid YAML"]),
    "two documents": ("---\nmerged: x\n", 10, ["not valid YAML"]),
    "a number as key": ("5: x\n", None, ["5"]),
    "a list as key": ("? [a, b]\n: x\n", 10, ["not valid YAML"]),
    "yes as a domain": ("!merged: m\ndomains:\n  on: {expert: e, prompts: p}\n", None, ["'domains"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_file_and_line(name, tmp_path):
    text, line, words = MISTAKES[name]
    path = write(tmp_path, text[1:] if text.startswith("!") else GOOD + text)
    with pytest.raises(UserError) as caught:
        read_run_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: " if line else str(path)), message
    for word in words:
        assert word in message
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 600


def test_files_that_are_no_settings(tmp_path):
    with pytest.raises(UserError, match="gone.yml does not exist"):
        read_run_file(tmp_path / "gone.yml")
    with pytest.raises(UserError, match="cannot be read"):
        read_run_file(tmp_path)
    for text in ("", "# only a comment\n", "- a\n- b\n", "words\n"):
        with pytest.raises(UserError, match=r"darts.yml holds no settings"):
            read_run_file(write(tmp_path, text))
    with pytest.raises(UserError, match="not UTF-8"):
        read_run_file(write(tmp_path, b"merged: \xff\n"))
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read_run_file(write(tmp_path, "# " + "x" * (1 << 20)))


BOMBS = {
    "nested aliases": "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{c}: &{c} [{', '.join(['*' + p] * 10)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
    "an alias of itself": "a: &a [*a]\n",
    "a mapping that holds itself": "a: &a {b: *a}\n",
    "deep nesting": "a: " + "[" * 5000 + "]" * 5000 + "\n",
    "a merge of itself": "a: &a {<<: *a, b: 1}\n",
    "nested merges": "a: &a {x: 1}\n"
    + "".join(f"{c}: &{c} {{<<: [{', '.join(['*' + p] * 9)}]}}\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
    "many digits": "a: " + "9" * 100_000 + "\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_no_time(name, tmp_path):
    path = write(tmp_path, GOOD + BOMBS[name])
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        read_run_file(path)
    assert time.process_time() - start < 3
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_plain_aliases_are_fine(tmp_path):
    text = "merged: m\ndomains:\n  a: &d {expert: e, prompts: p, samples: 3}\n  b: *d\n  c: {<<: *d, samples: 4}\n"
    got = read_run_file(write(tmp_path, text))
    assert [d.samples for d in got.domains.values()] == [3, 3, 4]


def test_lines_of_keys(tmp_path):
    data, lines = load_yaml(write(tmp_path, "a:\n  b: 1\n\n  c:\n    - x\n    - y\n"))
    assert data == {"a": {"b": 1, "c": ["x", "y"]}}
    assert lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 4, ("a", "c", 0): 5, ("a", "c", 1): 6}


def test_settings_without_a_file():
    domains = {"code": {"expert": "e", "prompts": "p"}}
    assert parse_run({"merged": "m", "domains": domains}).merged == "m"
    with pytest.raises(UserError, match=r"settings: unknown key 'bugdet'"):
        parse_run({"merged": "m", "domains": domains, "bugdet": 1})
    with pytest.raises(UserError, match=r"'fit.steps' is 'x'"):
        parse_run({"merged": "m", "domains": domains, "fit": {"steps": "x"}})


@pytest.mark.parametrize("extra", ["", "budget: 0.1%\n"], ids=["not in the file", "also in the file"])
def test_a_bad_override_is_said_by_its_key(tmp_path, extra):
    """The value came from the command line: the key is named, and no line of the file is to blame."""
    with pytest.raises(UserError, match="'budget' is '200%'") as caught:
        run(tmp_path, extra, {"budget": "200%"})
    assert ", line " not in str(caught.value)


def test_settings_do_not_change(tmp_path):
    got = run(tmp_path)
    with pytest.raises(Exception, match="frozen"):
        got.budget = 0.5
