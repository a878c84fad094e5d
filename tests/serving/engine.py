"""A small decoder as serving engines write it: flat tokens of many requests, fused weights, a residual of its own.

Takes a checkpoint of a Hugging Face Llama. Knows nothing of corrections.
"""

from __future__ import annotations

import torch
from torch import nn

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Norm(nn.Module):
    """RMS norm; with a residual it adds first, and returns the sum as the new residual."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x, residual=None):
        if residual is not None:
            x = residual = x + residual
        out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return out if residual is None else (out, residual)


class Block(nn.Module):
    """Attention and feed-forward of one layer, with one weight for q, k and v and one for gate and up."""

    def __init__(self, config, caches):
        super().__init__()
        d, h, kv, self.width = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.sizes, self.base, self.caches = (h, kv), config.rope_parameters["rope_theta"], caches
        self.qkv_proj = nn.Linear(d, (h + 2 * kv) * self.width, bias=False)
        self.o_proj = nn.Linear(h * self.width, d, bias=False)
        self.gate_up_proj = nn.Linear(d, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, d, bias=False)
        self.input_layernorm, self.post_attention_layernorm = Norm(config), Norm(config)

    def attend(self, positions, x):
        h, kv = self.sizes
        q, k, v = self.qkv_proj(x).view(len(x), h + 2 * kv, self.width).split([h, kv, kv], 1)
        q, k = self.turned(q, positions), self.turned(k, positions)
        out = []
        for request, span in self.caches["batch"]:
            key = (id(self), request)
            old = self.caches.get(key)
            keys = k[span] if old is None else torch.cat([old[0], k[span]])
            values = v[span] if old is None else torch.cat([old[1], v[span]])
            self.caches[key] = (keys, values)
            n, past = len(q[span]), len(keys) - len(q[span])
            mask = torch.ones(n, len(keys), dtype=torch.bool).tril(past)
            heads = [t.repeat_interleave(h // kv, 1).transpose(0, 1) for t in (keys, values)]
            seen = nn.functional.scaled_dot_product_attention(q[span].transpose(0, 1), *heads, attn_mask=mask)
            out.append(seen.transpose(0, 1).reshape(n, -1))
        return self.o_proj(torch.cat(out))

    def turned(self, x, positions):
        half = self.width // 2
        angle = positions[:, None].float() * self.base ** (-torch.arange(half) / half)
        cos, sin, (a, b) = angle.cos()[:, None].to(x), angle.sin()[:, None].to(x), x.split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def feed(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Parted(Block):
    """The stream after it is the sum of what it returns."""

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.attend(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.feed(hidden_states), residual


class Whole(Block):
    """It returns the stream."""

    def forward(self, positions, hidden_states):
        hidden_states = hidden_states + self.attend(positions, self.input_layernorm(hidden_states))
        return hidden_states + self.feed(self.post_attention_layernorm(hidden_states))


class Beside(Whole):
    """It returns the stream and something that nobody reads."""

    def forward(self, position_ids, hidden_states):
        return super().forward(position_ids, hidden_states), hidden_states


class Engine(nn.Module):
    """The model; `caches` is shared with its layers, and names the requests of the batch and their tokens' places."""

    def __init__(self, config, kind=Parted, first=0):
        super().__init__()
        self.kind, self.first, self.caches = kind, first, {}
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            kind(config, self.caches) if i >= first else nn.Identity() for i in range(config.num_hidden_layers)
        )
        self.norm = Norm(config)

    def forward(self, tokens, positions, states=None):
        h, residual = self.embed_tokens(tokens) if states is None else states, None
        for layer in self.layers[self.first :]:
            if self.kind is Parted:
                h, residual = layer(positions, h, residual=residual)
            elif self.kind is Beside:
                h, _ = layer(position_ids=positions, hidden_states=h)
            else:
                h = layer(positions, h)
        return self.norm(h, residual)[0] if residual is not None else self.norm(h)

    def load(self, weights):
        """Fuse a checkpoint's tensors into the parameters, in whatever order they come."""
        rows = dict(self.named_parameters())
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in weights:
            name = name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")
            for fused, split in FUSED.items():
                key = next((s for s in split if f".{s}." in name), None)
                if key is not None:
                    whole = parts.setdefault(name.replace(key, fused), {})
                    whole[key] = tensor
                    name, tensor = name.replace(key, fused), torch.cat([whole[s] for s in split if s in whole])
            if name in rows and rows[name].shape == tensor.shape:
                rows[name].data.copy_(tensor)
