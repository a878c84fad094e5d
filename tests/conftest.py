"""Every test has a cache folder of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Nothing a test stores is seen by another, or by the user's own runs."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MERGEDARTS_CACHE", str(folder))
    return folder
