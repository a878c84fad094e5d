"""Every value is in one bin, and that is the one its label names."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mergedarts.drift.bins import assign, coarse_position_bins, entropy_bins, middle, position_bins, turn_bins


@pytest.mark.parametrize("make", [position_bins, coarse_position_bins])
@pytest.mark.parametrize("last", [0, 1, 5, 20, 511, 8191])
def test_positions(make, last):
    bins = make(last)
    values = np.arange(last + 1)
    for value, index in zip(values, assign(bins, values), strict=True):
        assert bins[index].low <= value < bins[index].high
        first, _, end = bins[index].label.partition("-")
        assert int(first) <= value <= int(end or first)
    assert bins[0].low == 0
    assert bins[-1].low <= last
    assert all(a.high == b.low for a, b in pairwise(bins))


def test_widths_grow():
    labels = [b.label for b in position_bins(40)]
    assert labels[:8] == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert "19-22" in labels
    assert [b.label for b in coarse_position_bins(40)] == ["0", "1-3", "4-15", "16-63"]
    assert len(position_bins(8191)) < 60


def test_turns():
    assert [b.label for b in turn_bins(1)] == ["1"]
    assert [b.label for b in turn_bins(6)] == ["1", "2", "3", "4", "5-8"]
    assert [b.label for b in turn_bins(9)][-1] == "9-16"


def test_entropy_bands():
    bins = entropy_bins()
    values = np.array([-1e-7, 0.0, 0.0099, 0.01, 0.5, 0.999, 1.0, 2.9, 3.0, 11.0])
    assert [bins[i].label for i in assign(bins, values)] == [
        "0-0.01", "0-0.01", "0-0.01", "0.01-0.1", "0.5-1", "0.5-1", "1-2", "2-3", "3+", "3+",
    ]  # fmt: skip


def test_middle():
    assert middle(0, 1) == 0
    assert 8 < middle(8, 10) < 9
    assert middle(7, None) == 7
