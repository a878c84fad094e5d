"""Captions say what the numbers say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mergedarts.drift.bootstrap import Estimate
from mergedarts.report.captions import caption


@pytest.mark.parametrize(
    ("slope", "words"),
    [
        ((0.02, 0.01, 0.03), "The drift rises for each doubling of the position (merged +0.02 [+0.01, +0.03]"),
        ((-0.02, -0.03, -0.01), "The drift falls for each doubling"),
        ((0.0, -0.01, 0.01), "The drift shows no clear trend for each doubling"),
    ],
)
def test_slopes(drift, slope, words):
    domain = drift.domains["code"]
    merged = domain.models["merged"]
    changed = merged.slopes | {"position": replace(merged.slopes["position"], slope=Estimate(*slope))}
    domain = replace(domain, models=domain.models | {"merged": replace(merged, slopes=changed)})
    assert words in caption(domain, "position")


def test_sample_and_shares(drift):
    domain = drift.domains["code"]
    found = domain.systematic
    said = caption(domain, "systematic")
    assert f"{domain.tokens:,} tokens of {domain.sequences} sequences" in said
    assert f"a constant vector for each position takes away {found.constant.value:.0%}" in said
    assert f"{found.fitted_sequences} other sequences" in said
    assert f"{domain.high_entropy_tokens:.0%} of the tokens lie above 1 nat" in caption(domain, "entropy")
    assert "merged from 0.1000 (0) to 0.4000 (2); repaired from 0.1000 (0) to 0.1000 (2)" in caption(domain, "layer")
    assert "merged KL from" in caption(domain, "turn")
    assert "furthest at positions" in caption(domain, "position_entropy")
