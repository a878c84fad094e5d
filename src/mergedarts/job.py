"""What a run needs before any model runs: models found and compared, prompts read and encoded, stores opened.

Knows how a run file's names become models, prompt sets and features; fits and writes nothing.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import features
from .config import RunFile
from .distributed import deal, every, rank, size, total
from .errors import UserError
from .heads import keep_head, share_head
from .merging import merge_cached
from .models import (
    DTYPES,
    ModelRef,
    check_fit,
    check_ids,
    eos_ids,
    expert_names,
    fingerprint,
    folder,
    is_emulated,
    load_config,
    load_model,
    load_tokenizer,
    pick_device,
)
from .progress import say
from .prompts import Example, PromptSet, TokenSequence, check_tokenizer, encode, read_examples, split, with_continuation
from .shared import Shared
from .store import FeatureStore
from .streaming import fits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class DomainJob:
    """One domain: its expert and the sequences to calibrate with, none where it is fitted without prompts."""

    name: str
    expert: ModelRef
    expert_print: str
    prompts: PromptSet
    rollout: int
    unanswered: tuple[int, ...]
    places: tuple[int, ...] | None = None

    @property
    def whole_places(self) -> list[int]:
        """Of each sequence here, its place in the domain's set, of which each process has a share."""
        return list(range(len(self.prompts.sequences))) if self.places is None else list(self.places)

    def numbers(self, chosen: list[int]) -> list[int]:
        """Of some sequences, their numbers among those that all processes chose."""
        mine = [self.whole_places[i] for i in chosen]
        number = {place: i for i, place in enumerate(sorted(every(mine)))}
        return [number[place] for place in mine]

    def whole(self) -> PromptSet:
        """The sequences of all processes, in their order."""
        if self.places is None:
            return self.prompts
        pairs = every(list(zip(self.places, self.prompts.sequences, strict=True)))
        return PromptSet(tuple(sequence for _, sequence in sorted(pairs, key=lambda pair: pair[0])))

    def split(self, holdout: float, seed: int) -> tuple[list[int], list[int]]:
        """The sequences here that are fitted and those that are held out, of a split of the whole set."""
        parts = split(int(total(len(self.prompts.sequences))), holdout, seed)
        fitted, held = ([i for i, place in enumerate(self.whole_places) if place in set(part)] for part in parts)
        return fitted, held

    def share(self, holdout: float, seed: int) -> DomainJob:
        """What this process does of a domain.

        Raises:
            UserError: there are more processes than sequences to fit on or to check on.
        """
        if size() == 1:
            return self
        parts = split(len(self.prompts.sequences), holdout, seed)
        lengths = [len(s) for s in self.prompts.sequences]
        mine: list[int] = []
        for part in parts:
            if part and len(part) < size():
                raise UserError(
                    f"Domain '{self.name}' has {len(parts[0])} prompts to fit on and {len(parts[1])} held out, too few "
                    f"for {size()} processes; start fewer, or give more prompts."
                )
            mine += [part[i] for i in deal([lengths[i] for i in part])[rank()]]
        mine.sort()
        unanswered = tuple(i for i, place in enumerate(mine) if place in set(self.unanswered))
        return replace(self, prompts=self.prompts.subset(mine), places=tuple(mine), unanswered=unanswered)


@dataclass(frozen=True)
class Job:
    """A run made ready; `domains` in the order of the run file."""

    run: RunFile
    merged: ModelRef
    merged_print: str
    dtype: torch.dtype
    device: torch.device
    eos: frozenset[int]
    domains: tuple[DomainJob, ...]
    stream: bool = False
    shared: Shared | None = None

    def store(self, fingerprint_: str, prompts: PromptSet) -> FeatureStore:
        return FeatureStore(fingerprint_, prompts.digest, self.dtype, self.shared)

    def weights_store(self, domain: DomainJob) -> FeatureStore:
        """The store of an expert's weights, which do not depend on prompts."""
        return FeatureStore(domain.expert_print, "weights", self.dtype, self.shared)

    def load(self, ref: ModelRef) -> PreTrainedModel:
        """Load a model after letting go of what was loaded before."""
        gc.collect()
        return_memory()
        say(f"loading {ref}")
        return load_model(ref, self.dtype, self.device, self.stream)


def return_memory() -> None:
    """Give freed memory back to the system where the C library keeps it (glibc), so that models do not add up."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def prepare(run: RunFile, base: Path) -> Job:
    """Resolve and check a run: every mistake that can be known without running a model is said here.

    Args:
        run: the settings.
        base: folder that relative paths are relative to (the run file's).
    """
    trust = run.trust_remote_code
    device = pick_device(run.device)
    # Prompts first: they are read in no time, and a merge may take minutes.
    examples = {name: read_examples(domain, name, base) for name, domain in run.domains.items()}
    shared = Shared.opened(run.store, base)
    if run.merge is not None:
        config = Path(run.merge).expanduser()
        merged = ModelRef(str(merge_cached(config if config.is_absolute() else base / config, trust)), None, trust)
    else:
        assert run.merged is not None
        merged = ModelRef.parse(run.merged, base, trust)
    merged_print = fingerprint(merged)
    named = expert_names(merged)
    tokenizer = load_tokenizer(merged)
    eos = eos_ids(merged, tokenizer)
    domains: list[DomainJob] = []
    for name, domain in run.domains.items():
        expert = ModelRef.parse(named.get(domain.expert, domain.expert), base, trust)
        expert_print = fingerprint(expert)
        check_fit(merged, expert)
        check_tokenizer(examples[name], tokenizer, load_tokenizer(expert), str(merged), str(expert))
        prompts = PromptSet(tuple(encode(examples[name], tokenizer, eos, run.max_tokens)))
        _check_vocabulary(prompts, merged, expert)
        whole = DomainJob(name, expert, expert_print, prompts, domain.rollout, _unanswered(examples[name]))
        domains.append(whole.share(run.fit.holdout, run.fit.seed))
    dtype = DTYPES[run.dtype]
    if is_emulated(dtype, device):
        say(f"this CPU has no instructions for {run.dtype}; 'dtype: float32' is several times faster, in more memory")
    stream = _streams(run, merged, dtype, device)
    return Job(run, merged, merged_print, dtype, device, frozenset(eos), tuple(domains), stream, shared)


def _streams(run: RunFile, merged: ModelRef, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether decoder layers stay on disk: as the run says, or where the model does not fit in what is free."""
    if run.stream != "auto":
        return run.stream
    root, stored = folder(merged.model), getattr(load_config(merged), "dtype", None)
    if root.is_file() or fits(root, stored or dtype, dtype, device):
        return False
    say(f"{merged} is larger than what is free on {device}: its layers are streamed from disk ('stream: auto')")
    return True


def with_eval_prompts(job: Job, domain: DomainJob, examples: list[Example]) -> DomainJob:
    """The same domain with other examples, for measuring on them."""
    tokenizer = load_tokenizer(job.merged)
    check_tokenizer(examples, tokenizer, load_tokenizer(domain.expert), str(job.merged), str(domain.expert))
    prompts = PromptSet(tuple(encode(examples, tokenizer, set(job.eos), job.run.max_tokens)))
    _check_vocabulary(prompts, job.merged, domain.expert)
    return replace(domain, prompts=prompts, unanswered=_unanswered(examples))


def _check_vocabulary(prompts: PromptSet, *models: ModelRef) -> None:
    """Raise `UserError` where prompts use tokens that a model has no row for."""
    for model in models if prompts.sequences else ():
        check_ids(model, max(max(s.ids) for s in prompts.sequences))


def _unanswered(examples: list[Example]) -> tuple[int, ...]:
    """Which examples have no response, so that the expert writes one."""
    return tuple(i for i, e in enumerate(examples) if not e.has_response)


def answered(
    job: Job, domain: DomainJob, model: PreTrainedModel | None = None
) -> tuple[DomainJob, PreTrainedModel | None]:
    """The domain, its prompts followed by the expert's continuations where they had no response.

    Args:
        model: the expert, where it is loaded already; else it is loaded where something is to be written.

    Returns:
        The domain, and the expert where it is loaded.
    """
    if domain.unanswered and domain.rollout:
        asked = domain.prompts.subset(domain.unanswered)
        store = job.store(domain.expert_print, asked)
        name = f"rollout-{domain.rollout}"
        with store.making(name) as missing:
            if missing:
                model = model or job.load(domain.expert)
                rows = getattr(load_config(job.merged), "vocab_size", None)
                written = features.continuations(
                    model, asked, set(job.eos), domain.rollout, f"{domain.name}: responses", rows
                )
                flat = [token for s, t in zip(asked.sequences, written, strict=True) for token in t.ids[len(s) :]]
                lengths = [len(t) - len(s) for s, t in zip(asked.sequences, written, strict=True)]
                store.save(name, {"ids": torch.tensor(flat, dtype=torch.long), "lengths": torch.tensor(lengths)})
        stored = store.load(name)
        pieces = stored["ids"].split(stored["lengths"].tolist())
        sequences: list[TokenSequence] = list(domain.prompts.sequences)
        for i, piece in zip(domain.unanswered, pieces, strict=True):
            sequences[i] = with_continuation(sequences[i], piece.tolist())
        domain = replace(domain, prompts=PromptSet(tuple(sequences)), unanswered=())
    return domain, model


def run_expert(
    job: Job,
    domain: DomainJob,
    layers: list[int],
    model: PreTrainedModel | None = None,
    entropies: bool = False,
) -> tuple[DomainJob, PreTrainedModel | None]:
    """Make sure the store holds the expert's features; the expert is loaded only where something is missing.

    Args:
        layers: decoder layers whose states are wanted.
        model: the expert, where it is loaded already.
        entropies: whether those of its predictions are wanted.

    Returns:
        The domain, its prompts followed by the expert's continuations where they had no response, and the expert
        where it was loaded.
    """
    domain, model = answered(job, domain, model)
    store = job.store(domain.expert_print, domain.prompts)
    states = ["final", *(f"layer-{i}" for i in layers)]
    with store.making("head", *states, *(["entropy"] if entropies else [])) as missing:
        if missing:
            model = model or job.load(domain.expert)
            lacking = [i for i in layers if f"layer-{i}" in missing]
            keep_head(model, store)
            if set(states) & set(missing):
                features.collect(model, domain.prompts, store, f"{domain.name}: expert", lacking)
            if "entropy" in missing:
                features.keep_entropies(model, store, f"{domain.name}: expert's entropies")
        share_head(store)
    return domain, model


def run_merged(job: Job, domain: DomainJob, model: PreTrainedModel | None) -> PreTrainedModel | None:
    """Make sure the store holds the merged model's final states on a domain; returns the model if it was needed."""
    store = job.store(job.merged_print, domain.prompts)
    with store.making("final") as missing:
        if missing:
            model = model or job.load(job.merged)
            features.collect(model, domain.prompts, store, f"{domain.name}: merged", [])
    return model


def check_lengths(domain: DomainJob) -> None:
    """Raise `UserError` where a domain has nothing to fit on."""
    if all(len(s) < 2 for s in domain.prompts.sequences):
        raise UserError(
            f"Every prompt of domain '{domain.name}' is one token long, so nothing follows that could be repaired; "
            "give longer prompts, or set 'rollout' above 0."
        )
