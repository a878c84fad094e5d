"""What vLLM calls when it starts: names the exported classes to its registry, and imports none of them.

Knows the names of architectures; the classes are made in `vllm` when one is asked for.
"""

from __future__ import annotations

#: Before the name of a stock class in the `architectures` of a `hub` export.
PREFIX = "Mergedarts"
#: Ends of the names of causal language models.
CAUSAL = ("ForCausalLM", "LMHeadModel")


def register() -> None:
    """Register a class for the `hub` export of each causal LM that vLLM has; can be called again."""
    from vllm import ModelRegistry

    for stock in list(ModelRegistry.get_supported_archs()):
        if stock.endswith(CAUSAL) and not stock.startswith(PREFIX):
            ModelRegistry.register_model(f"{PREFIX}{stock}", f"mergedarts.serving.vllm:{PREFIX}{stock}")
