"""Output embeddings in the cache: kept once for all models that share one, found again by what a feature store notes.

Knows a model's own head and files named by digest; how states become logits is in `features`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .errors import UserError
from .files import cache_dir
from .models import head_parameters
from .store import FeatureStore, digest_tensors, load_tensors, save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Weight [vocabulary, d] and bias of an output embedding.
Head = tuple[torch.Tensor, torch.Tensor | None]


def keep_head(model: PreTrainedModel, store: FeatureStore) -> None:
    """Store a model's output embedding once for all models that share it, and note in `store` which it is."""
    weight, bias = head_parameters(model)
    tensors = {"weight": weight.cpu().contiguous()} | ({} if bias is None else {"bias": bias.cpu().contiguous()})
    digest = digest_tensors(tensors)
    path = _head_file(digest)
    if not path.is_file():
        save_tensors(path, tensors)
    store.save("head", {"digest": torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)})


def share_head(store: FeatureStore) -> None:
    """Put the output embedding noted in `store` where the store is shared."""
    if store.shared is None:
        return
    path = _head_file(_head_digest(store))
    if path.is_file() and not store.shared.has(f"heads/{path.name}"):
        store.shared.put(f"heads/{path.name}", path)


def load_head(store: FeatureStore, model: PreTrainedModel) -> Head | None:
    """The output embedding noted in `store`, on the device of `model`; None where it is that of `model` itself."""
    digest = _head_digest(store)
    weight, bias = head_parameters(model)
    if digest == digest_tensors({"weight": weight.cpu()} | ({} if bias is None else {"bias": bias.cpu()})):
        return None
    path = _head_file(digest)
    if store.shared is not None and not path.is_file():
        store.shared.fetch(f"heads/{path.name}", path, partial(_read_head, digest))
    tensors = _read_head(digest, path)
    moved = {name: tensor.to(weight) for name, tensor in tensors.items()}
    return moved["weight"], moved.get("bias")


def _head_digest(store: FeatureStore) -> str:
    return bytes(store.load("head")["digest"].tolist()).hex()


def _head_file(digest: str) -> Path:
    return cache_dir() / "heads" / f"{digest}.safetensors"


def _read_head(digest: str, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of an output embedding; a file that is not the one of the digest is a `UserError`."""
    tensors = load_tensors(path, "remove the feature store beside it")
    if digest_tensors(tensors) != digest:
        raise UserError(f"{path} is damaged (its checksum differs); remove it and the feature store beside it.")
    return tensors
