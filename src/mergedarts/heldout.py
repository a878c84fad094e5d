"""Measures a merged model, with and without a correction, against its expert on chosen sequences.

Knows how to get (corrected) final states of tokens and what the expert's are; knows nothing of fits or files written.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .correction import Correction
from .features import Readout, final_states, load_head
from .job import DomainJob, Job
from .measures import TokenMeasures, measure
from .runtime import attach

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HeldOut:
    """Measures on some sequences of a domain, each model state against the same expert.

    Args:
        job: the run.
        domain: its expert's features must be in the store.
        model: the merged model, loaded.
        chosen: indices of the sequences to measure on.
    """

    def __init__(
        self, job: Job, domain: DomainJob, model: PreTrainedModel, readout: Readout, chosen: list[int]
    ) -> None:
        self._model = model
        self._readout = readout
        self._domain = domain
        chosen = sorted(chosen)  # states come in the order of the subset, targets in that of the set
        self._prompts = domain.prompts.subset(chosen)
        prompts = domain.prompts
        inside = torch.from_numpy(prompts.sequence_index())
        follows = torch.from_numpy(prompts.next_ids()) >= 0
        predicts = torch.from_numpy(prompts.predicts())
        counted = predicts if predicts.any() else follows
        self._tokens = (torch.isin(inside, torch.tensor(chosen)) & counted).nonzero().squeeze(-1)
        self._sequence = inside[self._tokens]
        self._next = torch.from_numpy(prompts.next_ids())[self._tokens]
        self._positions = torch.from_numpy(prompts.positions())[self._tokens]
        expert = job.store(domain.expert_print, prompts)
        self._head = load_head(expert, model)
        self._target = expert.load("final")["hidden"][self._tokens]
        self._entropy = expert.load("entropy")["entropy"][self._tokens]
        merged = job.store(job.merged_print, prompts)
        # Where the flat tokens of the chosen sequences alone stand.
        chosen_tokens = torch.isin(inside, torch.tensor(chosen)).nonzero().squeeze(-1)
        self._inside = torch.isin(chosen_tokens, self._tokens)
        self._stored = merged

    @cached_property
    def _merged(self) -> torch.Tensor:
        """[n, d] final states of the merged model; a fit in depth needs none, so they may not be in the store."""
        return self._stored.load("final")["hidden"][self._tokens] if self._stored.has("final") else self._run()

    def __len__(self) -> int:
        return len(self._tokens)

    def merged(self) -> TokenMeasures:
        """Of the merged model as it is."""
        return self._measure(self._merged)

    def running(self) -> TokenMeasures:
        """Of the model as it is now, run again."""
        return self._measure(self._run())

    def expert(self) -> TokenMeasures:
        """Of the expert itself: no distance, and its own likelihood."""
        return self._measure(self._target, own_head=False)

    def expert_under_merged_head(self) -> TokenMeasures:
        """Of the expert's states read by the merged head: the floor of any correction of states."""
        return self._measure(self._target)

    def corrected(self, correction: Correction) -> TokenMeasures:
        """Of the merged model with a correction; runs the model again only where it has sites before the last."""
        return self._measure(self.states(correction))

    def states(self, correction: Correction) -> torch.Tensor:
        """[n, d] final states of the measured tokens with a correction."""
        sites = dict(correction.items())
        if set(sites) <= {"final"}:
            site = sites.get("final")
            if site is None:
                return self._merged
            fixed: torch.Tensor = site(self._merged.float(), self._merged.float(), self._positions).detach()
            return fixed.to(self._merged.dtype)
        with attach(self._model, {self._domain.name: correction}, self._domain.name):
            return self._run()

    def _run(self) -> torch.Tensor:
        """[n, d] final states of the measured tokens, of the model as it is now."""
        width = self._target.shape[1]
        states = torch.empty(self._prompts.tokens, width, dtype=self._target.dtype)
        offsets = self._prompts.offsets

        def take(batch: list[int], state: torch.Tensor) -> None:
            for row, i in enumerate(batch):
                states[offsets[i] : offsets[i + 1]] = state[row, : len(self._prompts.sequences[i])].cpu()

        final_states(self._model, self._prompts, take, f"{self._domain.name}: held-out check")
        return states[self._inside]

    def _measure(self, states: torch.Tensor, own_head: bool = True) -> TokenMeasures:
        return measure(
            self._readout,
            states,
            self._target,
            self._head,
            self._entropy,
            self._next,
            self._sequence,
            states_head=None if own_head else self._head,
        )
