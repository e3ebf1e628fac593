"""Attention by torch, of dense batches and of packed sequences."""

import itertools

import torch
import torch.nn.functional as F

from ..module.base import TransformerEngineBaseModule
from ..utils import SplitAlongDim

_SplitAlongDim = SplitAlongDim
__all__ = ["DotProductAttention", "SplitAlongDim"]


def _attended(query, key, value, causal, mask, scale):
    """``[length, batch, heads, size]`` to ``[length, batch, heads x size]``; True in ``mask`` hides."""
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if isinstance(mask, torch.Tensor):
        lengths = query.size(2), key.size(2)
        mask = ~mask.expand(*mask.shape[:-2], *lengths)
        if causal:
            mask = mask & torch.ones(lengths, dtype=torch.bool).tril()
        mask, causal = mask | torch.eye(*lengths, dtype=torch.bool), False  # padding sees itself, and nobody sees it
    grouped = query.size(1) != key.size(1)
    found = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return found.permute(2, 0, 1, 3).flatten(2)


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(self, num_attention_heads, kv_channels, attn_mask_type="causal", softmax_scale=None, **_):
        super().__init__()
        self.attn_mask_type, self.softmax_scale = attn_mask_type, softmax_scale

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format="sbhd",
        cu_seqlens_q=None,
        attn_mask_type=None,
        **_,
    ):
        tensors, causal = (query_layer, key_layer, value_layer), "causal" in (attn_mask_type or self.attn_mask_type)
        if qkv_format != "thd":
            return _attended(*tensors, causal, attention_mask, self.softmax_scale)
        four = query_layer.dim() == 4
        if four:
            tensors = tuple(tensor.squeeze(1) for tensor in tensors)
        ends, found = cu_seqlens_q.tolist(), []
        for begin, end in itertools.pairwise(ends):
            own = (tensor[begin:end].unsqueeze(1) for tensor in tensors)
            found.append(_attended(*own, causal, None, self.softmax_scale).squeeze(1))
        rest = tensors[0].size(0) - ends[-1]
        if rest:
            found.append(torch.zeros(rest, found[0].size(-1), dtype=found[0].dtype))
        packed = torch.cat(found)
        return packed.unsqueeze(1) if four else packed
