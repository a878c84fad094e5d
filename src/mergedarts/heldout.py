"""Measures a merged model, with and without a correction, against its expert on chosen sequences.

Knows how to get (corrected) final states of tokens and what the expert's are; knows nothing of fits or files written.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .correction import Correction
from .distributed import gather, total
from .features import Readout, entropies, final_states
from .heads import Head, load_head
from .job import DomainJob, Job
from .measures import TokenMeasures, joined, measure
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

    Attributes:
        prompts: the chosen sequences, in the order of the set; what follows is of their tokens in flat order.
        target: [m, d] final states of the expert.
        head: its output embedding, None where it is the merged model's.
        sequence: [m] number in the domain's set of the sequence each token is from.
        counted: [m] which tokens are measured: those that predict a response, or where there are none all but the last.
    """

    def __init__(
        self, job: Job, domain: DomainJob, model: PreTrainedModel, readout: Readout, chosen: list[int]
    ) -> None:
        self._model = model
        self._readout = readout
        self._domain = domain
        chosen = sorted(chosen)  # states come in the order of the subset, targets in that of the set
        prompts = domain.prompts
        self.prompts = prompts.subset(chosen)
        inside = torch.from_numpy(prompts.sequence_index())
        predicts, following = torch.from_numpy(prompts.predicts()), torch.from_numpy(prompts.next_ids())
        mine = torch.isin(inside, torch.tensor(chosen)).nonzero().squeeze(-1)
        self.counted = (predicts if predicts.any() else following >= 0)[mine]
        self.sequence = torch.tensor(domain.whole_places)[inside[mine]]
        self._next = following[mine]
        self._positions = torch.from_numpy(prompts.positions())[mine]
        expert = job.store(domain.expert_print, prompts)
        self.head = load_head(expert, model)
        self.target = expert.load("final")["hidden"][mine]
        self._stored, self._mine = job.store(job.merged_print, prompts), mine

    @cached_property
    def merged_states(self) -> torch.Tensor:
        """[m, d] final states of the merged model; a fit in depth needs none, so they may not be in the store."""
        return self._stored.load("final")["hidden"][self._mine] if self._stored.has("final") else self._run()

    @cached_property
    def entropy(self) -> torch.Tensor:
        """[m] of the expert's predictions, nats."""
        return entropies(self._readout, self.target, self.head, f"{self._domain.name}: entropies")

    def __len__(self) -> int:
        return int(total(int(self.counted.sum())))

    def merged(self) -> TokenMeasures:
        """Of the merged model as it is."""
        return self.measure(self.merged_states)

    def running(self) -> TokenMeasures:
        """Of the model as it is now, run again."""
        return self.measure(self._run())

    def expert(self) -> TokenMeasures:
        """Of the expert itself: no distance, and its own likelihood."""
        return self.measure_all((self.target, self.head))[0]

    def expert_under_merged_head(self) -> TokenMeasures:
        """Of the expert's states read by the merged head: the floor of any correction of states."""
        return self.measure(self.target)

    def corrected(self, correction: Correction) -> TokenMeasures:
        """Of the merged model with a correction; runs the model again only where it has sites before the last."""
        return self.measure(self.states(correction))

    def states(self, correction: Correction) -> torch.Tensor:
        """[m, d] final states with a correction."""
        sites = dict(correction.items())
        if set(sites) <= {"final"}:
            site = sites.get("final")
            if site is None:
                return self.merged_states
            fixed: torch.Tensor = site(self.merged_states.float(), self.merged_states.float(), self._positions).detach()
            return fixed.to(self.merged_states.dtype)
        with attach(self._model, {self._domain.name: correction}, self._domain.name):
            return self._run()

    def _run(self) -> torch.Tensor:
        """[m, d] final states of the model as it is now."""
        states = torch.empty_like(self.target)
        offsets = self.prompts.offsets

        def take(batch: list[int], state: torch.Tensor) -> None:
            for row, i in enumerate(batch):
                states[offsets[i] : offsets[i + 1]] = state[row, : len(self.prompts.sequences[i])].cpu()

        final_states(self._model, self.prompts, take, f"{self._domain.name}: held-out check")
        return states

    def measure(self, states: torch.Tensor) -> TokenMeasures:
        """Of final states [m, d] read by the merged model's head, at the tokens that are counted."""
        return self.measure_all((states, None))[0]

    def measure_all(self, *read: tuple[torch.Tensor, Head | None]) -> list[TokenMeasures]:
        """Of several final states [m, d], each with the head to read it with, for little more than of one.

        None is the merged model's head; `target` with `head` is the expert itself.
        """
        kept = self.counted
        target = self.target[kept]
        pairs = [(target if states is self.target else states[kept], head) for states, head in read]
        found = measure(self._readout, pairs, target, self.head, self._next[kept], self.sequence[kept])
        return [joined(gather(mine)) for mine in found]
