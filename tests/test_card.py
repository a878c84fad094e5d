"""The model card: every figure where it belongs, and nothing in a name that Markdown would run or break on."""

from __future__ import annotations

import copy

import pytest

from mergedarts.card import model_card


def means(kl, agreement, nll):
    return {"kl": kl, "agreement": agreement, "nll": nll, "tokens": 321, "sequences": 8, "ewl1": 0.1, "kl_high": 0.2}


CONFIG = {
    "mergedarts": "9.8.7",
    "merged": {"model": "/models/merge", "parameters": 1_234_567, "fingerprint": "f"},
    "parameters": {"added": 1235, "share": 0.0010003, "budget": 0.002},
    "settings": {
        "preset": "default",
        "fit": {"method": "closed-form", "loss": "auto", "seed": 5, "holdout": 0.2},
        "correction": {"form": "residual"},
        "dtype": "bfloat16",
        "budget": 0.002,
    },
    "domains": {
        "code": {
            "expert": "org/code-expert",
            "sequences": {"fit": 40, "held_out": 8},
            "shipped": True,
            "parameters": 1235,
            "notes": ["a note on the fit."],
            "held_out": {
                "merged": means(0.07214, 0.8512, 1.2344),
                "repaired": means(0.01236, 0.9487, 1.1004),
                "expert": means(0.0, 1.0, 1.0506),
                "share_closed": 0.8287,
                "share_closed_ci": [0.7812, 0.8649],
            },
        },
        "maths": {
            "expert": "org/maths-expert",
            "sequences": {"fit": 50, "held_out": 0},
            "shipped": False,
            "parameters": 0,
            "notes": [],
            "held_out": None,
        },
    },
}


def cells(card, domain):
    row = next(line for line in card.splitlines() if line.startswith(f"| {domain} |"))
    return [c.strip() for c in row.strip("|").split("|")]


def test_figures():
    card = model_card(CONFIG, "repaired")
    code = cells(card, "code")
    assert code[:5] == ["code", "8", "321", "0.0721", "0.0124"]
    assert code[5] == "83% [78%, 86%]"
    assert code[6] == "85.1% → 94.9%"
    assert code[7] == "1.234 / 1.100 / 1.051"
    assert code[8] == "1,235"
    assert "1,235 parameters, 0.100% of the model's 1,234,567" in card
    assert "2 domain(s)" in card
    assert "9.8.7" in card
    assert "seed 5" in card
    assert "20% of the sequences held out" in card
    assert "a note on the fit." in card
    assert 'mergedarts.load("repaired", domain="code")' in card


def test_the_table_is_a_table():
    """Every row has as many cells as the header."""
    lines = [line for line in model_card(CONFIG, "x").splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {10}


def test_what_was_not_measured_or_shipped_is_said():
    card = model_card(CONFIG, "x")
    assert "not measured" in cells(card, "maths")
    code, maths = card.split("**code**")[1].split("**maths**")
    assert "uncorrected" in maths.split("## Use")[0]
    assert "uncorrected" not in code


def test_without_an_interval_or_a_gap():
    config = copy.deepcopy(CONFIG)
    del config["domains"]["code"]["held_out"]["share_closed_ci"]
    assert cells(model_card(config, "x"), "code")[5] == "83%"
    config["domains"]["code"]["held_out"]["share_closed"] = None
    assert cells(model_card(config, "x"), "code")[5] == ""


@pytest.mark.parametrize(
    "hostile", ["a`b\n\n# Owned\n", '"); import os; os.system("x', "<script>x</script>", "a|b", "![x](y)"]
)
def test_names_cannot_break_out(hostile):
    config = copy.deepcopy(CONFIG)
    config["merged"]["model"] = config["domains"]["code"]["expert"] = hostile
    config["domains"]["code"]["notes"] = [hostile]
    card = model_card(config, hostile)
    lines = card.splitlines()
    assert "# Owned" not in lines
    assert sum(line.startswith("#") for line in lines) == 5  # title, measures, made, router, use
    assert sum(line.startswith("```") for line in lines) == 2
    code = card.split("```python")[1].split("```")[0]
    compile(code, "card", "exec")
    assert code.count('"') == 4
    outside = card.split("```python")[0]
    for line in outside.splitlines():
        plain = "".join(part for i, part in enumerate(line.split("`")) if i % 2 == 0)
        assert "<script" not in plain
        if "expert `" in line or "merged model `" in line:
            assert line.count("`") % 2 == 0  # the name does not end its code span
