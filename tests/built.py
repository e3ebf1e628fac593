"""What tests ask of a built GPT, and one whose microbatches are packed sequences."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megaprof.testing.faults import layers
from megaprof.testing.gpt import BuiltGPT, GPTWorkload, build, mean_loss

VARIABLE = {"variable_seq_lengths": True}
"""Options of a workload whose microbatches differ in length."""
Packs = tuple[tuple[int, ...], ...]
"""Tokens of every sequence in each microbatch: of one replica, or of all of them, replica after replica."""


def layer_numbers(gpt: BuiltGPT) -> list[list[int]]:
    """Megatron-core's numbers (from 1, over the whole model) of the layers in each chunk."""
    return [[layer.layer_number for layer in layers([chunk])] for chunk in gpt.chunks]


def digests(gpt: BuiltGPT) -> tuple[str, str]:
    """The sha256 of this rank's reduced gradients of the last step, and of its parameters, bit by bit."""
    gradients, parameters = hashlib.sha256(), hashlib.sha256()
    for number, chunk in enumerate(gpt.chunks):
        for name, parameter in sorted(chunk.named_parameters()):
            for digest, tensor in ((gradients, parameter.main_grad), (parameters, parameter.detach())):
                digest.update(f"{number}.{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return gradients.hexdigest(), parameters.hexdigest()


def build_packed(workload: GPTWorkload, packs: Packs) -> BuiltGPT:
    """A GPT that gets ``packs`` on the CPU; the workload has the option ``variable_seq_lengths``."""
    gpt = build(workload)
    for layer in layers(gpt.chunks):
        layer.self_attention.core_attention = _PackedAttention()
    return _PackedGPT(gpt, packs)


class _PackedGPT(BuiltGPT):
    def __init__(self, gpt: BuiltGPT, packs: Packs) -> None:
        from megatron.core import parallel_state

        super().__init__(gpt.workload, gpt.config, gpt.chunks)
        count = gpt.workload.microbatches
        self.packs = packs[parallel_state.get_data_parallel_rank() * count :][:count] or packs
        self.lengths = tuple(map(sum, self.packs))

    def _batches(self, step: int) -> Iterator[tuple[Any, ...]]:
        for batch, lengths in zip(super()._batches(step), self.packs, strict=True):
            yield *batch, lengths

    def forward_step(
        self, data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        from megatron.core.packed_seq_params import PackedSeqParams

        tokens, labels, lengths = next(data_iterator)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
        packed = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **longest)
        return model(tokens, positions, None, labels=labels, packed_seq_params=packed), mean_loss


class _PackedAttention(torch.nn.Module):
    """Attention over packed sequences on the CPU, which megatron-core's ``DotProductAttention`` refuses there: causal,
    without dropout. Each sequence is computed by itself, so the time is quadratic in its length, as on a GPU."""

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
