"""vLLM's own model classes with the corrections of a `hub` export inside.

Knows vLLM's interface of models and its registry, and no model family; how a layer is corrected is in `layers`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from ..errors import UserError
from .layers import Served
from .plugin import PREFIX

log = logging.getLogger("vllm.mergedarts")  # below vLLM's own, so that its settings hold


def __getattr__(name: str) -> Any:
    """The class of an exported architecture, such as `MergedartsLlamaForCausalLM`."""
    if name.startswith(PREFIX):
        return model_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def model_class(name: str) -> Any:
    """vLLM's class of the stock architecture, made to correct its layers.

    Raises:
        UserError: vLLM prepares models of this architecture by its name, or they keep a state beside the KV cache.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.interfaces import has_inner_state, is_attention_free, is_hybrid

    stock = name.removeprefix(PREFIX)
    base = ModelRegistry.models[stock].load_model_cls()
    if stock in MODELS_CONFIG_MAP or has_inner_state(base) or is_attention_free(base) or is_hybrid(base):
        raise UserError(f"Corrections of {stock} cannot be served by vLLM; serve its 'lora' or 'folded' export.")
    return type(name, (corrected(base),), {"__module__": __name__, "__qualname__": name})


def corrected(base: Any) -> Any:
    """A subclass of one of vLLM's causal LMs that corrects the domain which its configuration names."""

    class Corrected(base):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self._mergedarts = Served(self, vllm_config.model_config.hf_config)
            log.info("Serving the domain %s.", self._mergedarts.domain or "none: the merged model as it was")

        def forward(
            self,
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            intermediate_tensors: Any = None,
            inputs_embeds: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
            return self._mergedarts.at_head(output, positions)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            loaded: set[str] | None = super().load_weights(self._mergedarts.take(weights))
            return None if loaded is None else loaded | self._mergedarts.parameter_names()

    return Corrected
