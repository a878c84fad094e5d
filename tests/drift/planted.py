"""A domain whose merged model is its expert with a known change of the final states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mergedarts.drift import Case, assemble, domain_drift
from mergedarts.drift.layers import LayerSums
from mergedarts.drift.tokens import STATE_MEASURES
from mergedarts.features import Readout, collect, entropies
from mergedarts.heads import keep_head
from mergedarts.heldout import HeldOut
from mergedarts.job import DomainJob
from mergedarts.models import ModelRef
from mergedarts.prompts import PromptSet
from mergedarts.store import FeatureStore
from tests.tiny import prompt_set, tiny

NAMES = {7: "<b>&'\"", 8: "\x1b[31m", 9: "\n"}


class Words:
    """A tokenizer that writes token 7 as <b>, 8 as an escape sequence and others as their number."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(NAMES.get(i, f" {i}") for i in ids)


def planted(
    change: Any,
    prompts: PromptSet | None = None,
    fitted: int = 20,
    entropy: Any = None,
    repair: Any = None,
    layers: Any = None,
):
    """The diagnosis of a domain, and its HeldOut.

    Args:
        change: of expert states [n, d], positions [n] and entropies [n] gives the merged model's states.
        prompts: the first `fitted` sequences are fitted, the others measured.
        entropy: [n] replaces the expert's.
        repair: of merged states gives repaired ones.
        layers: by model the drift after each layer, the same for all tokens.
    """
    prompts = prompts or prompt_set(tuple(30 + (7 * i) % 20 for i in range(32)), None)
    model = tiny("llama")
    job = SimpleNamespace(
        merged_print="merged", store=lambda name, p: FeatureStore(name, p.digest, torch.float32),
        merged=ModelRef("/somewhere/merge"), run=SimpleNamespace(dtype="float32"),
    )  # fmt: skip
    store = job.store("expert", prompts)
    keep_head(model, store)
    collect(model, prompts, store, "e", [])
    readout, target = Readout(model), store.load("final")["hidden"]
    nats = entropies(readout, target, None, "e") if entropy is None else entropy
    positions = torch.from_numpy(prompts.positions())
    job.store("merged", prompts).save("final", {"hidden": change(target, positions, nats)})
    domain = DomainJob("code", ModelRef("/somewhere/code-expert"), "expert", prompts, 0, ())
    count = len(prompts.sequences)
    case = Case(domain, list(range(fitted)), domain, list(range(fitted, count)))
    held = HeldOut(job, domain, model, readout, case.measured)
    held.entropy = nats[int(prompts.offsets[fitted]) :]
    states = {"merged": held.merged_states}
    if repair is not None:
        states["repaired"] = repair(held.merged_states)
    measures = {name: held.measure(state) for name, state in states.items()}
    tokens = np.full((len(case.measured), len(next(iter(layers.values())))) if layers else (0, 0), 5.0)
    by_layer = {
        name: LayerSums(dict.fromkeys(STATE_MEASURES, tokens * values), dict.fromkeys(STATE_MEASURES, tokens))
        for name, values in (layers or {}).items()
    }
    found, sums = domain_drift(job, case, held, readout, Words(), states, measures, by_layer)
    return assemble(job, {"code": found}, {"code": sums}), held
