"""Models larger than memory: their decoder layers stay in the checkpoint on disk and are read while they run.

Knows accelerate's offloading and how an adapter is merged into one layer; the order of passes is in `layerwise`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import UserError
from .files import cache_dir, temporary_prefix
from .memory import free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: A model is kept in memory where it takes at most this share of what is free, so that states and fits have room.
SHARE_OF_FREE = 0.7


def is_streamed(model: PreTrainedModel) -> bool:
    """Whether a model's decoder layers are on disk."""
    return "disk" in (getattr(model, "hf_device_map", None) or {}).values()


def fits(root: Path, stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the model in a folder, whose weights are stored in one dtype, can be in memory whole in another."""
    size = sum(path.stat().st_size for path in root.glob("*.safetensors"))
    return size * dtype.itemsize / stored.itemsize <= SHARE_OF_FREE * free_memory(device)


def streaming_options(outline: PreTrainedModel, layers: list[str], device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told so that the decoder layers stay on disk and all else goes to a device.

    Args:
        outline: the model without weights.
        layers: module names of its decoder layers.
    """
    places: dict[str, str] = dict.fromkeys(layers, "disk")
    inside = layers[0].rpartition(".")[0] + "."

    def place(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if f"{prefix}{name}." == inside:
                continue
            if inside.startswith(f"{prefix}{name}."):
                place(child, f"{prefix}{name}.")
            else:
                places[prefix + name] = str(device)
        for own in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            places.update((prefix + name, str(device)) for name, _ in own)

    place(outline, "")
    # Families whose weights are laid out otherwise in memory than on disk have them written here as they are run.
    scratch = cache_dir() / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    return {
        "device_map": places,
        "offload_folder": tempfile.TemporaryDirectory(prefix=temporary_prefix("offload"), suffix=".tmp", dir=scratch),
    }


@contextmanager
def in_memory(module: nn.Module) -> Iterator[None]:
    """Keep a module's weights in memory inside the block; for a model that is there anyway, nothing happens."""
    found = [(part, hook) for part in module.modules() for hook in _offloads(part)]
    try:
        for part, hook in found:
            hook.pre_forward(part)
            hook.offload = False
        yield
    finally:
        for part, hook in found:
            if not hook.offload:
                hook.offload = True
                hook.post_forward(part, None)


def _offloads(module: nn.Module) -> list[Any]:
    """The hooks of a module that bring its weights from disk before it runs and drop them after."""
    hook = getattr(module, "_hf_hook", None)
    return [h for h in getattr(hook, "hooks", [hook]) if getattr(h, "offload", False)]


def forget_ties(model: PreTrainedModel) -> None:
    """Have no weight that is read from disk taken for a tied one that is in memory.

    accelerate knows tied weights by their address. Where one has been replaced since, as by an adapter, a weight that
    is read later may lie at its old address, and would be given the other's values.
    """
    for module in model.modules():
        for hook in _offloads(module):
            hook.tied_params_map, hook.tied_params_names = None, set()


def merge_streamed_adapter(model: PreTrainedModel, outline: PreTrainedModel, root: Path) -> None:
    """Have an adapter merged into each weight as it is read, by PEFT's own arithmetic.

    Args:
        model: streamed.
        outline: the same without weights, which PEFT is given in its place.
        root: the adapter's folder.

    Raises:
        UserError: the adapter does more than change the weights of modules.
    """
    from accelerate.utils import set_module_tensor_to_device
    from peft import PeftModel, load_peft_weights
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = PeftModel.from_pretrained(outline, str(root))
    state = load_peft_weights(str(root), device="cpu")
    for name, _ in list(adapted.named_parameters()):
        value = state.pop(name.replace(".default", ""), None)
        if value is not None:
            set_module_tensor_to_device(adapted, name, "cpu", value=value.float())
    if state or getattr(adapted.peft_config["default"], "use_dora", False):
        what = min(state, default="DoRA")
        raise UserError(f"The adapter {root} cannot be merged layer by layer ({what}); merge it into its base first.")
    for name, layer in adapted.base_model.model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        module = model.get_submodule(name)
        hooks = _offloads(module)
        for hook in hooks:
            hook.weights_map = _Merged(hook.weights_map, layer)
        if not hooks:
            module.weight.data = _merge(module.weight.data, layer)


class _Merged(Mapping[str, Any]):
    """A module's weights on disk, its adapter merged into `weight` when that is read."""

    def __init__(self, stored: Mapping[str, Any], layer: Any) -> None:
        self._stored, self._layer = stored, layer

    def __getitem__(self, name: str) -> Any:
        value = self._stored[name]
        return _merge(value, self._layer) if name == "weight" else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _merge(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    base = layer.get_base_layer()
    base.weight = nn.Parameter(weight.cpu().clone(), requires_grad=False)
    try:
        layer.merge()
        merged: torch.Tensor = base.weight.data
    finally:
        layer.merged_adapters = []
        base.weight = nn.Parameter(torch.empty_like(base.weight, device="meta"), requires_grad=False)
    return merged.to(weight.device)


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is a file without a name: what does not fit goes to disk, and nothing is left behind."""
    folder = cache_dir() / "scratch"
    folder.mkdir(parents=True, exist_ok=True)
    count = 1
    for size in shape:
        count *= size
    with tempfile.NamedTemporaryFile(dir=folder, prefix=temporary_prefix("states"), suffix=".tmp") as file:
        file.truncate(max(1, count) * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).reshape(shape)
