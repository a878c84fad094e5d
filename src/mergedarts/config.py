"""The run file (`darts.yml`): what to repair, with what, and how.

Knows the settings, their defaults and their words for a mistake; does not look at models, prompts or tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import UserError

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 20_000

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"


class Settings(BaseModel):
    """A part of the run file: unknown keys are mistakes, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DatasetPrompts(Settings):
    """Prompts from a data set of the Hugging Face hub (needs `mergedarts[datasets]`)."""

    dataset: str
    column: str
    response_column: str | None = None
    config: str | None = None
    split: str = "train"


class Domain(Settings):
    """One task of the merged model, and the expert that knows it."""

    expert: str = Field(description="model folder, hub id, `model+adapter`, or a name from mergekit_config.yml")
    prompts: str | DatasetPrompts | None = Field(
        None, description="JSON lines, plain text of one prompt a line, or a data set; `form: svd` can do without"
    )
    samples: int = Field(50, ge=1, le=100_000, description="calibration examples, taken from the start of the file")
    rollout: int = Field(128, ge=0, le=8192, description="tokens the expert writes where an example has no response")


def _position(value: Any) -> Any:
    """Read `smooth: 8`, `table: 512`, `none` and `constant` into a `PositionForm`."""
    if isinstance(value, str) and value in ("none", "constant"):
        return {"form": value}
    if isinstance(value, dict) and len(value) == 1:
        (form, size), *_ = value.items()
        if form in ("smooth", "table"):
            return {"form": form, "size": size}
    return value


class PositionForm(Settings):
    """How the additive bias depends on the position: `none`, `constant`, `smooth: k` functions, `table: P` rows."""

    form: Literal["none", "constant", "smooth", "table"]
    size: int = Field(0, ge=0, le=1 << 20)

    @model_validator(mode="after")
    def _sized(self) -> PositionForm:
        if self.form in ("smooth", "table") and self.size < 1:
            raise ValueError(f"'{self.form}' needs a size of at least 1, such as '{self.form}: 8'")
        return self

    @property
    def label(self) -> str:
        """As a run file says it."""
        return f"{self.form}: {self.size}" if self.form in ("smooth", "table") else self.form


class EverySite(Settings):
    every: int = Field(ge=1)


def _share(value: Any) -> Any:
    """Read `0.1%` as 0.001."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            return value
    return value


class CorrectionSettings(Settings):
    """What is added to the merged model. `auto` values are chosen by held-out error within the budget."""

    form: Literal["auto", "residual", "linear", "svd"] = "auto"
    sites: Literal["auto", "final", "all"] | EverySite | Annotated[list[int], Field(min_length=1)] = "auto"
    rank: Annotated[int, Field(ge=1, le=1 << 16, strict=True)] | Literal["auto", "full"] = "auto"
    position: Annotated[PositionForm, BeforeValidator(_position)] | Literal["auto"] = "auto"
    svd_share: Annotated[float, BeforeValidator(_share), Field(ge=0, lt=1)] | Literal["auto"] = Field(
        "auto", description="share of the budget for truncated-SVD weight updates under the corrections in depth"
    )
    positions: int | None = Field(None, ge=1, le=1 << 20, description="short for `position: {table: P}`")

    @model_validator(mode="after")
    def _one_position(self) -> CorrectionSettings:
        if self.positions is not None and self.position != "auto":
            raise ValueError("'positions' is short for 'position: {table: P}'; give one of them")
        return self

    @property
    def position_form(self) -> PositionForm | None:
        """The position form asked for, or None for `auto`."""
        if self.positions is not None:
            return PositionForm(form="table", size=self.positions)
        return None if isinstance(self.position, str) else self.position


class FitSettings(Settings):
    """How the correction is fitted on cached features."""

    method: Literal["closed-form", "adam"] = "closed-form"
    objective: Literal["states", "kl"] = Field("states", description="what a fit at the final site lowers")
    metric: Literal["auto", "fisher", "states"] = Field(
        "auto",
        description="closed form: errors count by what they do to the expert's predictions (auto in depth, from a "
        "quarter of the sequences or less; fisher, from all), or all alike (states)",
    )
    ridge: float | None = Field(None, ge=0, description="strength of the ridge; chosen by held-out folds if not given")
    top_k: int = Field(256, ge=1, description="expert's likeliest tokens kept for `objective: kl`")
    loss: Literal["auto", "ewl1", "l1"] = Field("auto", description="token weights; auto leaves them to the metric")
    gamma: float | None = Field(None, ge=0, le=4, description="ewl1: a token weighs its entropy to this power")
    prompt_weight: float | None = Field(None, ge=0, le=1, description="weight of tokens before the response")
    steps: int = Field(500, ge=1, le=1_000_000)
    lr: float = Field(1e-3, gt=0)
    seed: int = Field(0, ge=0)
    holdout: float = Field(0.2, ge=0, lt=1, description="share of whole sequences kept for checking the fit")


class RunFile(Settings):
    """A whole run: the merged model (or the merge to make), the domains, the correction and its fit."""

    merged: str | None = None
    merge: str | None = None
    domains: dict[str, Domain] = Field(min_length=1)
    preset: Literal["default", "paper", "surgery"] = "default"
    correction: CorrectionSettings = CorrectionSettings()
    fit: FitSettings = FitSettings()
    budget: Annotated[float, BeforeValidator(_share), Field(gt=0, le=1)] = 0.001
    device: str = "auto"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    stream: bool | Literal["auto"] = Field(
        "auto", description="read decoder layers from disk as they run; auto does where a model does not fit in memory"
    )
    store: str | None = Field(
        None, min_length=1, description="folder or fsspec address where machines share features; $MERGEDARTS_STORE"
    )
    max_tokens: int = Field(2048, ge=2, description="longer sequences are cut at the end")
    router: bool = Field(True, description="fit a router, so that `domain: auto` can choose by the prompt")
    strict: bool = Field(False, description="make it an error where a domain is not improved")
    trust_remote_code: bool = False

    @field_validator("domains")
    @classmethod
    def _names(cls, domains: dict[str, Domain]) -> dict[str, Domain]:
        import re

        for name in domains:
            if not re.fullmatch(NAME_PATTERN, name) or name in ("none", "auto", "unsure"):
                raise ValueError(
                    f"{name!r} cannot name a domain; use letters, digits, '_' and '-', not 'none', 'auto' or 'unsure'"
                )
        return domains

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        """Fill what the file leaves open from the preset it names."""
        if not isinstance(data, dict):
            return data
        named = data.get("preset", "default")
        preset = PRESETS.get(named, {}) if isinstance(named, str) else {}
        filled = dict(data)
        for part, values in preset.items():
            given = data.get(part)
            if isinstance(given, dict):
                # An explicit position, whichever way it is written, replaces the preset's.
                taken = {"position", "positions"} if {"position", "positions"} & set(given) else set()
                filled[part] = {k: v for k, v in values.items() if k not in taken} | given
            elif given is None:
                filled[part] = values
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> RunFile:
        if (self.merged is None) == (self.merge is None):
            raise ValueError("give one of 'merged' (a model) and 'merge' (a mergekit config)")
        c, f = self.correction, self.fit
        for name, domain in self.domains.items():
            if domain.prompts is None and c.form != "svd":
                raise ValueError(
                    f"'domains.{name}.prompts' is missing; only 'correction.form: svd' fits without prompts"
                )
        if f.method == "adam" and (c.sites not in ("auto", "final") or c.form not in ("auto", "residual")):
            raise ValueError("'fit.method: adam' fits the final site only; use 'closed-form' for other sites and forms")
        if f.method == "adam" and c.position_form is not None and c.position_form.form == "smooth":
            raise ValueError("'fit.method: adam' knows 'position: none', 'constant' and 'table: P' only")
        if f.method == "adam" and c.rank == "full":
            raise ValueError("'rank: full' needs 'fit.method: closed-form'")
        if c.form == "linear" and (c.sites == "final" or c.position_form not in (None, PositionForm(form="none"))):
            raise ValueError(
                "'form: linear' updates weights in depth, which know no position; leave out 'sites: final' "
                "and 'position'"
            )
        if f.objective == "kl" and c.sites != "final":
            raise ValueError("'fit.objective: kl' fits the final site only; add 'sites: final' to the correction")
        return self


#: What a preset sets where the run file is silent. `paper` and `surgery` are the recipes of method.md.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "paper": {
        "correction": {"form": "residual", "sites": "final", "rank": 16, "position": {"table": 512}},
        "fit": {"method": "adam", "loss": "ewl1", "prompt_weight": 1.0},
    },
    "surgery": {
        "correction": {"form": "residual", "sites": "final", "rank": 16, "position": "none"},
        "fit": {"method": "adam", "loss": "l1", "prompt_weight": 1.0},
    },
}


#: How the library fails at a tag such as !!timestamp on a value that is none.
_LIBRARY_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and keeps the line of every key."""


def read_run_file(path: Path, overrides: dict[str, Any] | None = None) -> RunFile:
    """Read and check a run file.

    Args:
        path: a YAML file of at most 1 MiB.
        overrides: top-level keys that win over the file's (from the command line); None values are left out.

    Raises:
        UserError: the file is missing, is not YAML, or has a value or key that is not understood; names key and line.
    """
    data, lines = load_yaml(path)
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no settings; it must be a mapping with 'merged' and 'domains'.")
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    lines = {at: line for at, line in lines.items() if at[0] not in given}
    return parse_run(data | given, str(path), lines)


def parse_run(data: dict[str, Any], name: str = "settings", lines: dict[tuple[Any, ...], int] | None = None) -> RunFile:
    """Check settings given as a mapping; errors as in `read_run_file`."""
    try:
        return RunFile.model_validate(data)
    except ValidationError as error:
        raise UserError(_sentence(error, name, lines or {})) from None


def load_yaml(path: Path) -> tuple[Any, dict[tuple[Any, ...], int]]:
    """Parse a bounded YAML file safely; returns its data and the line of each key path."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    if len(raw) > MAX_FILE_BYTES:
        raise UserError(f"{path} is larger than 1 MiB, which no settings file needs; check that it is the right file.")
    lines: dict[tuple[Any, ...], int] = {}
    try:
        loader = _Loader(raw.decode("utf-8"))
        try:
            node = loader.get_single_node()
            if node is None:
                return None, lines
            _index(node, (), lines, str(path), [0])
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text.") from None
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{where}: not valid YAML ({error.problem or error.context}).") from None
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ) as error:
        # A tag such as !!timestamp on a value that is none fails inside the library in its own ways.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path} is not valid YAML ({reason}).") from None


def _index(
    node: yaml.Node, at: tuple[Any, ...], lines: dict[tuple[Any, ...], int], name: str, count: list[int]
) -> None:
    count[0] += 1
    if count[0] > MAX_NODES:
        raise UserError(f"{name} expands to more than {MAX_NODES} values; take out nested aliases.")
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            label = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            if label in seen:
                what = "domain" if at == ("domains",) else "key"
                raise UserError(f"{name}, line {line}: {what} '{label}' is given twice (first in line {seen[label]}).")
            seen[label] = line
            lines[(*at, label)] = line
            _index(value, (*at, label), lines, name, count)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*at, i)] = value.start_mark.line + 1
            _index(value, (*at, i), lines, name, count)


def _sentence(error: ValidationError, name: str, lines: dict[tuple[Any, ...], int]) -> str:
    """The first mistake of a ValidationError, in one sentence with key and line."""
    problems = error.errors()
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    if isinstance(first.get("input"), dict):
        # A mapping where text would do too: what it lacks says more than that it is not text.
        first = next((p for p in problems if p["type"] == "missing"), first)
    # Pydantic adds the names of union members to the location; without them, the longest prefix the file knows is it.
    location = tuple(part for part in first["loc"] if not _is_member(part))
    known = location
    while known and known not in lines:
        known = known[:-1]
    named = location if first["type"] == "missing" or not known else known
    key = ".".join(str(part) for part in named if not _is_member(part))
    where = f"{name}, line {lines[known]}" if known in lines else name
    if first["type"] == "extra_forbidden":
        allowed = _allowed(location[:-1])
        hint = f"; known here: {', '.join(allowed)}" if allowed else ""
        return f"{where}: unknown key '{key}'{hint}."
    if first["type"] == "missing":
        return f"{where}: '{key}' is missing."
    if first["type"] == "too_short" and key == "domains":
        return f"{where}: 'domains' is empty; name at least one."
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}."
    same = [p["msg"] for p in problems if tuple(p["loc"])[: len(known)] == known]
    expected = " or ".join(
        dict.fromkeys(m.removeprefix("Input should be ").removeprefix("Value error, ") for m in same)
    )
    return f"{where}: '{key}' is {first['input']!r:.80}, but should be {expected}."


def _is_member(part: Any) -> bool:
    """Whether a part of a location is the name of a union's member and not a key of the file."""
    return isinstance(part, str) and (part in _MEMBERS or "[" in part)


_MEMBERS = {"str", "int", "DatasetPrompts", "EverySite", "PositionForm"}


def _allowed(location: tuple[Any, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {"correction": CorrectionSettings, "fit": FitSettings}
    if not location:
        return list(RunFile.model_fields)
    if location[0] == "domains" and location[-1] == "prompts":
        return list(DatasetPrompts.model_fields)
    if location[0] == "domains" and len(location) == 2:
        return list(Domain.model_fields)
    model = models.get(str(location[0])) if len(location) == 1 else None
    return list(model.model_fields) if model else []
