"""What a diagnosis found, as typed dataclasses, as `drift.json` and as a pandas frame.

Knows the schema (documented in docs/diagnose.md) and no tensors; measuring is in the modules beside this one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .bootstrap import Estimate

if TYPE_CHECKING:
    import pandas as pd

#: Version of the schema of `drift.json`; raised when a field changes its meaning or goes.
SCHEMA = 1

#: What is averaged at every point: name and unit or range.
MEASURES = {
    "drift": "|h - h*|_1 / d",
    "relative": "|h - h*|_1 / |h*|_1",
    "cosine": "cos(h, h*)",
    "kl": "KL(expert || model), nats a token",
    "agreement": "share of tokens with the same likeliest next token",
}


@dataclass(frozen=True)
class Point:
    """Means over the tokens of a bin (or of two crossed bins, or of a layer).

    Attributes:
        label: of the bin, as people read it.
        low, high: the bin's edges (low included, high not); high is None for an open bin and where it is a layer's.
        tokens, sequences: what is behind the point.
        measures: by name of `MEASURES`; `kl` and `agreement` are missing where they are not measured.
        band: label of the entropy band, for crossed bins.
    """

    label: str
    low: float
    high: float | None
    tokens: int
    sequences: int
    measures: dict[str, Estimate]
    band: str | None = None


@dataclass(frozen=True)
class ModelDrift:
    """One model (merged or repaired) against the expert.

    Attributes:
        overall: over all response tokens.
        axes: points by axis: `position` (response tokens), `prompt_position` (the other tokens), `since_prompt`,
            `entropy`, `turn` (where there are several), `layer` (where measured) and `position_entropy`.
        slopes: `position`, `since_prompt` (where there are responses) and `entropy`.
    """

    overall: Point
    axes: dict[str, list[Point]]
    slopes: dict[str, Slope]


@dataclass(frozen=True)
class Slope:
    """A least-squares slope over tokens, with its interval over sequences.

    Attributes:
        mean: of what the slope is of, over the same tokens.
        unit: what the slope is of and for each what.
        tokens, sequences: behind it.
    """

    slope: Estimate
    mean: float | None
    unit: str
    tokens: int
    sequences: int


@dataclass(frozen=True)
class Answer:
    """A question of the report, answered for the whole merge.

    Attributes:
        answer: `yes` (the slope's interval lies above zero), `no`, or `unknown` (too few sequences).
        sentence: with slope, interval and sample.
        slope: over all domains, each about its own means.
    """

    question: str
    answer: str
    sentence: str
    slope: Slope


@dataclass(frozen=True)
class Systematic:
    """Share of the merged model's drift power, sum |h* - h|^2 at the final site, that a form of repair removes on
    held-out sequences after it was fitted on others.

    Attributes:
        constant: by a constant vector for each position bin (what a position table can do).
        linear: by the best linear map of h of some rank (what the low-rank part can do).
        both: by the two together.
        by_position: the three for each position bin: label, low, high, tokens, sequences and measures of those names.
        rank, ridge: of the linear map, the ridge chosen on folds of the fitted sequences.
        fitted_tokens, fitted_sequences: behind the fit.
    """

    constant: Estimate
    linear: Estimate
    both: Estimate
    by_position: list[Point]
    rank: int
    ridge: float
    fitted_tokens: int
    fitted_sequences: int


@dataclass(frozen=True)
class Candidate:
    """A token a model holds likely, and its probability."""

    text: str
    probability: float


@dataclass(frozen=True)
class Disagreement:
    """A position where merged model and expert disagree.

    Attributes:
        sequence: number of the example in its file, from 0.
        position: of the state that predicts `token`.
        before, token, after: text around the predicted token of the reference.
        entropy: of the expert, nats.
        kl: by model, nats.
        top: by model (`expert`, `merged`, `repaired`) the five likeliest tokens.
    """

    sequence: int
    position: int
    before: str
    token: str
    after: str
    entropy: float
    kl: dict[str, float]
    top: dict[str, list[Candidate]]


@dataclass(frozen=True)
class DomainDrift:
    """A domain.

    Attributes:
        expert: short name of the expert.
        sequences, tokens: measured (tokens that predict a response, or all where no example has one).
        high_entropy_tokens, high_entropy_kl: share of tokens above 1 nat of entropy, and of the merged model's KL
            that they carry (None where the KL is zero).
        models: `merged`, and `repaired` where there is a repair.
        closed: share of the merged model's KL and drift that the repair takes away, by `kl` and `drift`.
        systematic: None where no sequences are left to fit on.
        disagreements: the positions of largest KL, largest first.
    """

    expert: str
    sequences: int
    tokens: int
    high_entropy_tokens: float
    high_entropy_kl: float | None
    models: dict[str, ModelDrift]
    closed: dict[str, Estimate]
    systematic: Systematic | None
    disagreements: list[Disagreement]


@dataclass(frozen=True)
class Drift:
    """A diagnosis of a merge: what `drift.json` holds.

    Attributes:
        merged: short name of the merged model; `merged_fingerprint` says which it is.
        dtype: of the forward passes.
        answers: `position` and `entropy`.
        domains: by name.
    """

    merged: str
    merged_fingerprint: str
    dtype: str
    answers: dict[str, Answer]
    domains: dict[str, DomainDrift]

    @property
    def repaired(self) -> bool:
        """Whether a repair was measured too."""
        return any("repaired" in domain.models for domain in self.domains.values())

    def to_json(self) -> dict[str, Any]:
        """The content of `drift.json`."""
        from .. import __version__

        return {"schema": SCHEMA, "mergedarts": __version__, **asdict(self)}

    def to_frame(self) -> pd.DataFrame:
        """One row for each domain, model, axis, bin and measure, with value, low, high, tokens and sequences.

        The overall means are the axis `overall`, the shares of `Systematic` the axis `systematic`.
        """
        try:
            import pandas as pd
        except ImportError:
            raise UserError("A frame needs pandas; pip install 'mergedarts[report]'.") from None
        rows: list[dict[str, Any]] = []

        def add(domain: str, model: str, axis: str, points: list[Point]) -> None:
            for p in points:
                at: dict[str, Any] = {"domain": domain, "model": model, "axis": axis, "bin": p.label, "band": p.band}
                at |= {"bin_low": p.low, "bin_high": p.high, "tokens": p.tokens, "sequences": p.sequences}
                rows.extend(at | {"measure": name} | asdict(found) for name, found in p.measures.items())

        for name, domain in self.domains.items():
            for kind, model in domain.models.items():
                add(name, kind, "overall", [model.overall])
                for axis, points in model.axes.items():
                    add(name, kind, axis, points)
            if domain.systematic is not None:
                add(name, "merged", "systematic", domain.systematic.by_position)
        return pd.DataFrame(rows)
