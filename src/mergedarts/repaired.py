"""The folder of a repaired model: written whole, checked when read, loaded for use.

Knows the files of `architecture.md`; does not know how corrections are fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .card import model_card
from .checksums import check_sum, write_sums
from .config import NAME_PATTERN, parse_run
from .correction import FILE, Correction, load_corrections, save_corrections
from .errors import UserError
from .files import read_json, write_text
from .folders import new_folder
from .job import Job, prepare
from .models import DTYPES, ModelRef, fingerprint, load_model, load_tokenizer, pick_device
from .router import UNSURE, Router
from .runtime import Handle, attach
from .store import load_tensors, save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "darts_config.json"
ROUTER = "router.safetensors"
FORMAT = 2
MEND = "calibrate again"


class _Part(BaseModel):
    """A part of `darts_config.json`: what is read of it must be of its type; more may stand there."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Merged(_Part):
    model: str
    fingerprint: str
    parameters: int
    trust_remote_code: bool = False


class _Means(_Part):
    kl: float
    agreement: float
    nll: float
    tokens: int
    sequences: int


class _HeldOut(_Part):
    merged: _Means
    repaired: _Means
    expert: _Means
    share_closed: float | None
    share_closed_ci: list[float] | None = Field(None, min_length=2, max_length=2)


class _Sequences(_Part):
    fit: int
    held_out: int


class _Choice(_Part):
    layer: int | None = None
    position: str
    ridge: float
    held_out_error: dict[str, float]


class _Choices(_Part):
    probes: list[_Choice] = []
    svd_share: float = Field(0.0, ge=0, lt=1)
    svd_share_kl: dict[str, float] = {}

    @model_validator(mode="after")
    def _chosen(self) -> _Choices:
        if self.svd_share_kl and "svd_share" not in self.model_fields_set:
            raise ValueError("no share of weight updates was chosen")
        return self


class _Source(_Part):
    prompts: str | dict[str, Any]
    samples: int = Field(ge=1)
    rollout: int = Field(ge=0)


class _Domain(_Part):
    expert: str
    expert_fingerprint: str
    source: _Source | None = None
    sequences: _Sequences
    parameters: int
    shipped: bool
    held_out: _HeldOut | None
    choices: _Choices
    notes: list[str]


class _Position(_Part):
    form: Literal["table", "smooth"]
    size: int = Field(ge=1)
    last: int = Field(ge=0)


class _Site(_Part):
    site: str
    kind: Literal["final", "residual", "linear"]
    rank: int = Field(ge=0)
    relu: bool
    position: _Position | None = None
    inner: bool = False
    bias: bool = False


class _Added(_Part):
    added: int
    share: float


class _Fit(_Part):
    method: str
    loss: str
    seed: int
    holdout: float


class _Correction(_Part):
    form: str


class _Settings(_Part):
    preset: str
    budget: float
    dtype: str
    fit: _Fit
    correction: _Correction


class _RouterHeldOut(_Part):
    sequences: int
    accuracy: float | None
    chosen: dict[str, dict[str, int]]

    @model_validator(mode="after")
    def _measured(self) -> _RouterHeldOut:
        if self.sequences > 0 and self.accuracy is None:
            raise ValueError("no accuracy of the held-out sequences")
        return self


class _Router(_Part):
    """What was fitted, or a note why nothing was."""

    note: str | None = None
    depth: int = Field(0, ge=0)
    layers: int = 0
    second_pass: bool = False
    parameters: int = 0
    held_out: _RouterHeldOut | None = None
    kl: dict[str, dict[str, float]] = {}

    @model_validator(mode="after")
    def _whole(self) -> _Router:
        needed = {"depth", "layers", "second_pass", "parameters", "kl"}
        if self.note is None and (self.held_out is None or not needed <= self.model_fields_set):
            raise ValueError("neither a note nor all that is said of a router")
        return self


class Described(_Part):
    """What this version reads of `darts_config.json`."""

    format: int
    mergedarts: str
    merged: _Merged
    domains: dict[Annotated[str, Field(pattern=rf"^{NAME_PATTERN}$")], _Domain] = Field(min_length=1)
    sites: dict[str, list[_Site]]
    parameters: _Added
    router: _Router | None = None
    settings: _Settings

    @model_validator(mode="after")
    def _routed(self) -> Described:
        chosen = self.router.held_out.chosen if self.router and self.router.held_out else {}
        if any(name not in self.domains or set(row) != {*self.domains, UNSURE} for name, row in chosen.items()):
            raise ValueError("the router chooses among other domains")
        return self


@dataclass(frozen=True)
class Repaired:
    """A repaired model in memory: unpacks to model, tokenizer and handle."""

    model: PreTrainedModel
    tokenizer: Any
    handle: Handle

    def __iter__(self) -> Any:
        return iter((self.model, self.tokenizer, self.handle))


def write_repaired(
    out: Path, config: dict[str, Any], corrections: dict[str, Correction], router: Router | None = None
) -> None:
    """Write corrections, router, `darts_config.json` and the model card; an old folder stands until all are whole."""
    import json

    with new_folder(out, CONFIG) as folder:
        full = {"format": FORMAT, **config, "sites": save_corrections(folder, corrections)}
        if router is not None:
            save_tensors(folder / ROUTER, router.tensors())
        write_text(folder / CONFIG, json.dumps(full, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / "README.md", model_card(full, out.name))
        write_sums(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """The `darts_config.json` of a repaired model, checked for its format."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a repaired model (it has no {CONFIG}); make one with 'mergedarts calibrate'.")
    check_sum(folder, CONFIG, MEND)
    config = read_json(folder / CONFIG)
    try:
        described = Described.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UserError(
            f"{folder / CONFIG} lacks what a repaired model needs ({where}: {first['msg'].lower()}); calibrate again."
        ) from None
    if described.format != FORMAT:
        raise UserError(
            f"{folder} has format {described.format}, this mergedarts reads {FORMAT}; calibrate again, or use another "
            "version of it."
        )
    if set(described.domains) != set(described.sites):
        raise UserError(f"{folder / CONFIG} describes sites of other domains than it names; calibrate again.")
    read: dict[str, Any] = config
    return read


def domains_of(config: dict[str, Any]) -> dict[str, Any]:
    """The domains of the run that made a repaired model, as a run file has them."""
    return {
        name: {"expert": entry["expert"], **(entry.get("source") or {})} for name, entry in config["domains"].items()
    }


def job_of(folder: Path, device: str | None = None, merged: str | None = None) -> Job:
    """The run that made a repaired model, made ready again: what measures it needs its prompts and experts.

    Raises:
        UserError: prompts, an expert or the merged model have moved or changed.
    """
    config = read_config(folder)
    settings = config["settings"] | {"merged": merged or config["merged"]["model"], "merge": None}
    settings |= {"domains": domains_of(config), "store": None} | ({"device": device} if device else {})
    job = prepare(parse_run(settings, str(folder / CONFIG)), Path.cwd())
    if job.merged_print != config["merged"]["fingerprint"]:
        raise UserError(f"The corrections in {folder} were made for another model than {job.merged} is now.")
    for domain in job.domains:
        if domain.expert_print != config["domains"][domain.name]["expert_fingerprint"]:
            raise UserError(f"The corrections in {folder} were made for another expert than {domain.expert} is now.")
    return job


def read_corrections(folder: Path) -> dict[str, Correction]:
    """The corrections of a repaired model by domain."""
    config = read_config(folder)
    check_sum(folder, FILE, MEND)
    return load_corrections(folder, config["sites"])


def read_router(folder: Path) -> Router | None:
    """The router of a repaired model, None where none was fitted."""
    config = read_config(folder)
    said = config.get("router")
    if said is None or said.get("note") is not None:
        return None
    path = folder / ROUTER
    check_sum(folder, ROUTER, MEND)
    tensors = load_tensors(path, MEND)
    try:
        router = Router(list(config["domains"]), said["depth"], tensors)
        whole = router.is_consistent()
    except (KeyError, IndexError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"{path} does not match darts_config.json beside it; calibrate again.")
    return router


def load(
    folder: str | Path,
    *,
    merged: str | None = None,
    domain: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Repaired:
    """Load a repaired model.

    Args:
        folder: what `calibrate` wrote.
        merged: where the merged model is now, if it has moved.
        domain: the domain to begin with; None is the uncorrected model, `auto` the router's choice for each row.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        dtype: `bfloat16`, `float16` or `float32`; None takes that of the calibration.
        trust_remote_code: let the merged model run code of its own; what the folder says of it does not count.

    Returns:
        Model, tokenizer and handle; `model, tokenizer, handle = load(...)` works.

    Raises:
        UserError: the folder is not a repaired model, or the merged model is missing or another one.
    """
    folder = Path(folder)
    config = read_config(folder)
    corrections, router = read_corrections(folder), read_router(folder)
    made_for = config["merged"]
    ref = ModelRef.parse(merged or made_for["model"], trust_remote_code=trust_remote_code)
    if made_for.get("trust_remote_code") and not trust_remote_code:
        raise UserError(f"The merged model {ref} of {folder} needs code of its own; allow it with 'trust_remote_code'.")
    if merged is None and ref.model.startswith("/") and not Path(ref.model).exists():
        raise UserError(f"The merged model of {folder} is gone from {ref.model}; say where it is with 'merged'.")
    if fingerprint(ref) != made_for["fingerprint"]:
        raise UserError(
            f"The corrections in {folder} were made for another model than {ref} is now; calibrate on this one again."
        )
    named = dtype or config["settings"]["dtype"]
    if named not in DTYPES:
        raise UserError(f"'{named}' is not a dtype here; choose one of {', '.join(DTYPES)}.")
    model = load_model(ref, DTYPES[named], pick_device(device))
    return Repaired(model, load_tokenizer(ref), attach(model, corrections, domain, router))
