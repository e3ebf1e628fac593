"""Attention over packed sequences on the CPU, which megatron-core's own attention refuses there. Each sequence is
computed by itself, so the time is quadratic in its length, as on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch


class PackedAttention(torch.nn.Module):
    """Replaces megatron-core's ``DotProductAttention``: causal, without dropout."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
    ) -> torch.Tensor:
        """``query``, ``key`` and ``value`` are [token, head, size]; the result is [token, head x size]."""
        packed = options["packed_seq_params"]
        # Padding follows the sequence, where none of its tokens attends to it.
        padded = packed.cu_seqlens_q_padded
        ends = (packed.cu_seqlens_q if padded is None else padded).tolist()
        outputs = []
        for begin, end in itertools.pairwise(ends):
            if begin == end:  # hosts pad their lists of boundaries
                continue
            q, k, v = (tensor[begin:end].transpose(0, 1)[None] for tensor in (query, key, value))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            outputs.append(attended[0].transpose(0, 1).reshape(end - begin, -1))
        return torch.cat(outputs)
