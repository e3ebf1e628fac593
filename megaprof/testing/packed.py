"""Attention over packed sequences on the CPU, where megatron-core's own refuses them: each sequence by itself, and so
quadratic in its length, as on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch


class PackedAttention(torch.nn.Module):
    """In the place of megatron-core's ``DotProductAttention``: causal, without dropout."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **others: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **others: Any
    ) -> torch.Tensor:
        """``query``, ``key`` and ``value`` are [token, head, size]; the result is [token, head x size]."""
        packed = others["packed_seq_params"]
        # What a sequence is filled up with stands behind it, where no token of it looks.
        padded = packed.cu_seqlens_q_padded
        ends = (packed.cu_seqlens_q if padded is None else padded).tolist()
        found = []
        for begin, end in itertools.pairwise(ends):
            if begin == end:  # a host's lists of boundaries are filled up
                continue
            q, k, v = (each[begin:end].transpose(0, 1)[None] for each in (query, key, value))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            found.append(attended[0].transpose(0, 1).reshape(end - begin, -1))
        return torch.cat(found)
