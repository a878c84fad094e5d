"""Runs a causal LM one decoder layer at a time over a whole set of sequences.

Knows how to make any family's own forward run a single layer, by putting the others aside; knows no corrections.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import UserError
from .features import batches, hooked, padded, state_of
from .models import decoder_layers
from .prompts import PromptSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Stop(Exception):
    """Ends a decoder's forward after the layer that was wanted."""


class LayerRunner:
    """The residual stream of a model over some sequences, moved on one layer at a time.

    The decoder's own forward runs for each batch and layer, so masks, rotary embeddings and whatever else a family
    hands to its layers are its own; all layers but one pass their input on.

    Args:
        model: a causal LM.
        prompts: the sequences.

    Raises:
        UserError: the layers share more than the hidden state, so that one at a time is not the model.

    Attributes:
        states: [tokens, d] the stream after `depth` layers, in flat token order; may be replaced by corrected ones.
        current: while a layer runs, which places of the batch [B, T] are real tokens, and their flat indices.
    """

    def __init__(self, model: PreTrainedModel, prompts: PromptSet) -> None:
        self._decoder = model.get_decoder()
        self._layers = [layer for _, layer in decoder_layers(model)]
        self._device = next(model.parameters()).device
        self._prompts = prompts
        self._batches = batches(prompts)
        self._rows = [
            [slice(int(prompts.offsets[i]), int(prompts.offsets[i + 1])) for i in batch] for batch in self._batches
        ]
        self._outputs = self._check()
        self.depth = 0
        self.current: tuple[torch.Tensor, torch.Tensor] = (torch.zeros(0, dtype=torch.bool), torch.zeros(0))
        self.states = self._first()

    @torch.inference_mode()
    def _check(self) -> list[int]:
        """How many things each layer returns (0: a bare tensor); fails where layers cannot run one at a time."""
        shortest = min(range(len(self._prompts.sequences)), key=lambda i: len(self._prompts.sequences[i]))
        ids = padded(self._prompts, [shortest], self._device)[:, :32]
        inputs: list[torch.Tensor] = []
        outputs: list[Any] = []
        hooks = [layer.register_forward_hook(lambda m, i, o: outputs.append(o)) for layer in self._layers]
        hooks += [
            layer.register_forward_pre_hook(lambda m, a, k: inputs.append(_hidden(a, k)), with_kwargs=True)
            for layer in self._layers
        ]
        with hooked(*hooks):
            self._decoder(input_ids=ids, use_cache=False)
        counts = [len(o) if isinstance(o, tuple) else 0 for o in outputs]
        self._outputs = counts
        alone = inputs[0] if inputs else None
        for depth in range(len(self._layers)):
            if len(inputs) != len(self._layers) or alone is None:
                raise UserError(f"{type(self._decoder).__name__} does not run its layers in a row; use 'sites: final'.")
            # A pass over other tokens replaces whatever a layer leaves behind for a later one.
            self._decoder(input_ids=ids.flip(1) // 2, use_cache=False)
            shared = UserError(
                f"The layers of {type(self._decoder).__name__} share more than the hidden state, so they cannot be "
                "corrected one at a time; use 'sites: final' for this model."
            )
            try:
                alone = self._run(depth, ids, alone)
            except (KeyError, AttributeError, IndexError, TypeError, ValueError, RuntimeError):
                # What the layer reads from others was never made in this pass.
                raise shared from None
            if not torch.equal(alone, state_of(outputs[depth])):
                raise shared
        return counts

    @torch.inference_mode()
    def _first(self) -> torch.Tensor:
        """[tokens, d] the input of the first layer."""
        caught: list[torch.Tensor] = []

        def catch(_module: nn.Module, args: Any, kwargs: Any) -> None:
            caught.append(_hidden(args, kwargs))
            raise _Stop

        flat: torch.Tensor | None = None
        with hooked(self._layers[0].register_forward_pre_hook(catch, with_kwargs=True)):
            for batch, rows in zip(self._batches, self._rows, strict=True):
                with suppress(_Stop):
                    self._decoder(input_ids=padded(self._prompts, batch, self._device), use_cache=False)
                state = caught.pop()
                if flat is None:
                    flat = torch.empty(self._prompts.tokens, state.shape[-1], dtype=state.dtype)
                for row, where in enumerate(rows):
                    flat[where] = state[row, : where.stop - where.start].cpu()
        assert flat is not None
        return flat

    def step(self) -> Iterator[int]:
        """Run the next layer over all sequences and move on; yields the tokens done as it goes."""
        out = torch.empty_like(self.states)
        yield from self._layer(out)
        self.states = out
        self.depth += 1

    def peek(self) -> Iterator[int]:
        """Run the next layer over all sequences for what hooks on its parts see; the states stay."""
        yield from self._layer(None)

    @torch.inference_mode()
    def _layer(self, out: torch.Tensor | None) -> Iterator[int]:
        for batch, rows in zip(self._batches, self._rows, strict=True):
            ids = padded(self._prompts, batch, self._device)
            state = torch.zeros(*ids.shape, self.states.shape[1], dtype=self.states.dtype, device=self._device)
            for row, where in enumerate(rows):
                state[row, : where.stop - where.start] = self.states[where].to(self._device)
            real = torch.zeros(ids.shape, dtype=torch.bool)
            for row, where in enumerate(rows):
                real[row, : where.stop - where.start] = True
            self.current = (real, torch.cat([torch.arange(where.start, where.stop) for where in rows]))
            state = self._run(self.depth, ids, state)
            for row, where in enumerate(rows):
                if out is not None:
                    out[where] = state[row, : where.stop - where.start].cpu()
            yield sum(where.stop - where.start for where in rows)

    def _run(self, depth: int, ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The output of one layer on a batch's hidden states [B, T, d]."""
        caught: list[torch.Tensor] = []

        def replace(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (state, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": state}

        def catch(_module: nn.Module, _args: Any, output: Any) -> None:
            caught.append(state_of(output))
            raise _Stop

        layer = self._layers[depth]
        hooks = [
            layer.register_forward_pre_hook(replace, with_kwargs=True, prepend=True),
            layer.register_forward_hook(catch),
        ]
        with self._aside(depth), hooked(*hooks), suppress(_Stop):
            self._decoder(input_ids=ids, use_cache=False)
        return caught.pop()

    @contextmanager
    def _aside(self, depth: int) -> Iterator[None]:
        """The layers before one pass their input on."""
        before = self._layers[:depth]
        own = [vars(layer).get("forward") for layer in before]
        try:
            for layer, count in zip(before, self._outputs[:depth], strict=True):
                layer.forward = _pass_on(count)
            yield
        finally:
            for layer, forward in zip(before, own, strict=True):
                if forward is None:
                    del layer.forward
                else:
                    layer.forward = forward


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _pass_on(count: int) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        return (hidden, *[None] * (count - 1)) if count else hidden

    return forward
