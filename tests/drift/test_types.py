"""The frame and the JSON hold the same numbers."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from mergedarts.drift import SCHEMA
from tests.drift.planted import planted
from tests.tiny import D, prompt_set


def test_frame_and_json():
    v = torch.randn(D, generator=torch.Generator().manual_seed(0))
    drift, _ = planted(lambda h, p, e: h + 0.1 * v, prompt_set((30,) * 14, 12), fitted=4, repair=lambda h: h - 0.05 * v)
    data = json.loads(json.dumps(drift.to_json(), allow_nan=False))
    assert data["schema"] == SCHEMA
    assert data["merged"] == "merge"
    assert data["domains"]["code"]["expert"] == "code-expert"
    assert "/somewhere" not in json.dumps(data), "no paths of the machine that made it"
    frame = drift.to_frame()
    assert set(frame.model) == {"merged", "repaired"}
    for model, found in data["domains"]["code"]["models"].items():
        for axis, points in found["axes"].items():
            rows = frame[(frame.model == model) & (frame.axis == axis)]
            assert len(rows) == sum(len(p["measures"]) for p in points)
            for p in points:
                band = rows.band.isna() if p["band"] is None else rows.band == p["band"]
                mine = rows[(rows.bin == p["label"]) & band].set_index("measure")
                for name, value in p["measures"].items():
                    assert mine.loc[name, "value"] == value["value"]
                    assert mine.loc[name, "tokens"] == p["tokens"]
    shares = frame[frame.axis == "systematic"]
    assert len(shares) == 3 * len(data["domains"]["code"]["systematic"]["by_position"])
    assert asdict(drift.answers["position"])["sentence"] == data["answers"]["position"]["sentence"]
