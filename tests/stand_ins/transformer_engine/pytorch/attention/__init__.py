"""Attention by torch, of dense batches and of packed sequences; with context parallelism, of dense causal ones."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..module.base import TransformerEngineBaseModule
from ..utils import SplitAlongDim

_SplitAlongDim = SplitAlongDim
__all__ = ["DotProductAttention", "SplitAlongDim"]


def _attended(query, key, value, causal, mask, scale):
    """``[length, batch, heads, size]`` to ``[length, batch, heads x size]``; True in ``mask`` hides."""
    if isinstance(mask, torch.Tensor):
        lengths = query.size(0), key.size(0)
        mask = ~mask.expand(*mask.shape[:-2], *lengths)
        if causal:
            mask = mask & torch.ones(lengths, dtype=torch.bool).tril()
        mask, causal = mask | torch.eye(*lengths, dtype=torch.bool), False  # padding sees itself, and nobody sees it
    return _by_torch(query, key, value, causal, mask, scale)


def _by_torch(query, key, value, causal, seen, scale):
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    found = F.scaled_dot_product_attention(
        *(query, key, value), attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=query.size(1) != key.size(1)
    )
    return found.permute(2, 0, 1, 3).flatten(2)


class _Gathered(torch.autograd.Function):
    """The parts of all ranks of ``group``, one after the other; gradients go back to where they are from."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.contiguous(), group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


def _attended_by_part(query, key, value, group, scale):
    """Causal attention where a rank has two parts of a sequence that is cut into twice as many as there are ranks: one
    from its front, and the one that lies as far from its end."""
    ranks, length = group.size(), query.size(0)
    half = torch.arange(length // 2)
    numbers = (number for rank in range(ranks) for number in (rank, 2 * ranks - 1 - rank))
    places = torch.cat([half + number * len(half) for number in numbers])
    own = places[group.rank() * length : (group.rank() + 1) * length]
    seen = places[None] <= own[:, None]
    return _by_torch(query, _Gathered.apply(key, group), _Gathered.apply(value, group), False, seen, scale)


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self, num_attention_heads, kv_channels, attn_mask_type="causal", softmax_scale=None, cp_group=None, **_
    ):
        super().__init__()
        self.attn_mask_type, self.softmax_scale, self.cp_group = attn_mask_type, softmax_scale, cp_group

    def set_context_parallel_group(self, cp_group, *_):
        self.cp_group = cp_group

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
        if self.cp_group is not None and self.cp_group.size() > 1:
            if qkv_format == "thd" or not causal:
                raise NotImplementedError("with context parallelism: dense causal batches")
            return _attended_by_part(*tensors, self.cp_group, self.softmax_scale)
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
