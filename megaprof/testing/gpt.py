"""A small GPT of megatron-core's own classes, trained by megatron-core's own schedules: something real to measure.

`build` makes the model that a `~megaprof.testing.GPTWorkload` describes, in an initialised process. `BuiltGPT` trains
it, evaluates it and computes log-probs, as Megatron-LM and the RL frameworks based on it do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megaprof.testing.faults import layers, pace
from megaprof.testing.workload import GPTWorkload

ForwardBackward = Callable[..., list[Any]]
"""What ``megatron.core.pipeline_parallel.get_forward_backward_func()`` returns."""

#: With this part of a core, a layer has computed long before 24 ms have passed, and it waits at most so many times.
_ENOUGH, _MOST_TIMES = 0.25, 8.0


def _layout_options(workload: GPTWorkload, field_names: Iterable[str]) -> dict[str, Any]:
    """Returns the options of TransformerConfig that give this layout. ``field_names``: those that this megatron-core
    has."""
    layout, pp, vpp = workload.chunk_layers, workload.pp, workload.vpp or 1
    if len(set(layout)) == 1:
        return {}
    stages = [sum(layout[stage::pp]) for stage in range(pp)]
    equal_chunks = all(len(set(layout[stage::pp])) == 1 for stage in range(pp))
    if equal_chunks and min(layout) > 0 and len(set(stages[1:-1])) <= 1:
        options = {"num_layers_in_first_pipeline_stage": stages[0]}
        if pp > 2:
            options["num_layers_in_last_pipeline_stage"] = stages[-1]
        return options
    if "pipeline_model_parallel_layout" in field_names:
        return {"pipeline_model_parallel_layout": workload.layout_string}
    raise ValueError(
        f"layout={layout}: this megatron-core has no pipeline_model_parallel_layout (0.13+ has); it can only give the "
        f"first and the last of {pp} stages layers of their own, the same in each of a stage's {vpp} chunks"
    )


def _config(workload: GPTWorkload) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    field_names = {field.name for field in dataclasses.fields(TransformerConfig)}
    dtype = getattr(torch, workload.dtype)
    overlap_p2p = workload.vpp is not None and workload.overlap_p2p is not False
    options: dict[str, Any] = {
        "num_layers": workload.layers,
        "hidden_size": workload.hidden,
        "num_attention_heads": workload.heads,
        "tensor_model_parallel_size": workload.tp,
        "pipeline_model_parallel_size": workload.pp,
        "virtual_pipeline_model_parallel_size": workload.vpp,
        "expert_model_parallel_size": workload.ep,
        "sequence_parallel": workload.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": True,
        "variable_seq_lengths": workload.seq_lengths is not None or workload.packs is not None,
        "overlap_p2p_comm": overlap_p2p,
        "batch_p2p_comm": not overlap_p2p,
        "num_moe_experts": workload.experts,
        "moe_token_dispatcher_type": workload.dispatcher,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Fused kernels are CUDA's.
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "finalize_model_grads_func": finalize_model_grads,
        **_layout_options(workload, field_names),
    }
    if workload.combined_1f1b:
        if "overlap_moe_expert_parallel_comm" not in field_names:
            raise ValueError("combined_1f1b=True: this megatron-core does not have it, 0.14+ does")
        options["overlap_moe_expert_parallel_comm"] = True
    return TransformerConfig(**options)


def _build_chunk(workload: GPTWorkload, config: Any, chunk: int, device: str = "cpu") -> Any:
    """Returns one model chunk, wrapped as Megatron-LM's ``get_model`` wraps it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    # Since 0.13 the chunk is an argument; before, only the global is asked.
    stage: dict[str, int] = {}
    if workload.vpp is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        if "vp_stage" in inspect.signature(GPTModel.__init__).parameters:
            stage = {"vp_stage": chunk}
    layer = get_gpt_layer_local_spec(num_experts=workload.experts, moe_grouped_gemm=False)
    if workload.packs is not None:
        layer.submodules.self_attention.submodules.core_attention = _PackedAttention
    model = GPTModel(
        config,
        layer,
        vocab_size=workload.vocab,
        max_sequence_length=workload.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        **stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    model.to(device)
    module = Float16Module(config, model) if config.bf16 else model
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=workload.overlap_grad_reduce)
    return DistributedDataParallel(config, ddp, module, disable_bucketing=chunk > 0)


def build(workload: GPTWorkload, device: str = "cpu") -> BuiltGPT:
    """Initialises model parallelism, and builds this rank's part of the model, with its optimizer.

    On the CPU it needs an open `~megaprof.testing.cpu_megatron`; on any device the default process group
    (`~megaprof.testing.init_distributed`) with ``workload.world_size`` ranks. Called again in the same process, it
    first destroys the model parallel groups of the earlier workload, whose model can then no longer run.

    Raises:
        ValueError: the world has another size, or this megatron-core cannot do what the workload asks for.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    world = torch.distributed.get_world_size()
    if world != workload.world_size:
        raise ValueError(f"world of {world} ranks: this workload needs {workload.world_size} (tp x pp x dp)")
    config = _config(workload)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        # 0.12 keeps these, and a rank that was in those groups takes itself to be in the new ones as well.
        parallel_state._EMBEDDING_GLOBAL_RANKS = None
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=workload.tp,
        pipeline_model_parallel_size=workload.pp,
        virtual_pipeline_model_parallel_size=workload.vpp,
        expert_model_parallel_size=workload.ep,
    )
    # Megatron-LM's rule: stages differ, the replicas of a stage do not.
    seed = workload.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    chunks = [_build_chunk(workload, config, chunk, device) for chunk in range(workload.vpp or 1)]
    if (layer_ms := _layer_ms(workload, device)) is not None:
        pace(layers(chunks), lambda: layer_ms)
    if workload.overlap_grad_reduce:
        # As Megatron-LM's train() does: a function for one chunk, a list of them for several.
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return BuiltGPT(workload, config, chunks)


def _layer_ms(workload: GPTWorkload, device: str) -> tuple[float, float] | None:
    """Returns what layers take, the same on all ranks. The first rank says so if it is longer than was asked."""
    if workload.layer_ms is None or not workload.patient:
        return workload.layer_ms
    times = torch.tensor([_ENOUGH / _share_of_a_core()], device=device).clamp(1.0, _MOST_TIMES)
    torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MAX)
    forward_ms, backward_ms = (ms * times.item() for ms in workload.layer_ms)
    if times.item() > 1.0 and torch.distributed.get_rank() == 0:
        said = f"This machine is busy: each layer waits {forward_ms:.0f} ms forward and {backward_ms:.0f} ms backward."
        print(said, file=sys.stderr, flush=True)
    return forward_ms, backward_ms


def _share_of_a_core() -> float:
    """Returns the part of a core that this thread got while it could run, since it began. Starting a rank takes seconds
    of computing, so this says how busy the machine is. 1 if the system does not count it."""
    try:
        ran_ns, waited_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    except (OSError, ValueError):
        return 1.0
    return max(ran_ns, 1) / max(ran_ns + waited_ns, 1)


class BuiltGPT:
    """This rank's chunks of a `GPTWorkload`, ready to run.

    Attributes:
        chunks: the model chunks, megatron-core's DistributedDataParallel around GPTModel; what a host passes on as
            ``model``.
        config: their TransformerConfig.
        optimizer: AdamW over the chunks' parameters.
        step: the next training step, from 0.
    """

    def __init__(self, workload: GPTWorkload, config: Any, chunks: list[Any]) -> None:
        self.workload = workload
        self.config = config
        self.chunks = chunks
        self.optimizer = torch.optim.AdamW(parameter for chunk in chunks for parameter in chunk.parameters())
        self.step = 0

    @property
    def layer_numbers(self) -> list[list[int]]:
        """Megatron-core's numbers (from 1, over the whole model) of the layers in each chunk."""
        return [[layer.layer_number for layer in layers([chunk])] for chunk in self.chunks]

    def data_iterator(self, step: int) -> Iterator[Any] | list[Iterator[Any]]:
        """The batches of ``step``, as ``forward_backward_func`` takes them: an iterator, with ``vpp`` one per chunk.

        Tokens depend on seed, step and data parallel rank only; labels are a fixed permutation of the tokens, so that
        there is something to learn.
        """
        if self.workload.vpp is None:
            return self._batches(step)
        return [self._batches(step) for _ in self.chunks]

    def _batches(self, step: int) -> Iterator[tuple[Any, ...]]:
        from megatron.core import parallel_state

        workload = self.workload
        replica = parallel_state.get_data_parallel_rank()
        # A generator of its own: data must not move the random state that the model draws from.
        seed = hashlib.sha256(f"{workload.seed} {step} {replica}".encode()).digest()
        device = next(self.chunks[0].parameters()).device
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        multiplier = next(number for number in range(5, workload.vocab + 6) if math.gcd(number, workload.vocab) == 1)
        packs = workload.packs
        lengths = workload.seq_lengths or (workload.seq_length,) * workload.microbatches
        if packs is not None:
            packs = packs[replica * workload.microbatches :][: workload.microbatches] or packs
            lengths = tuple(map(sum, packs))
        for number, length in enumerate(lengths):
            tokens = torch.randint(workload.vocab, (workload.micro_batch_size, length), generator=generator).to(device)
            labels = (tokens * multiplier + 1) % workload.vocab
            yield (tokens, labels) if packs is None else (tokens, labels, packs[number])

    @staticmethod
    def _inputs(tokens: torch.Tensor, packed: tuple[int, ...] = ()) -> tuple[Any, ...]:
        """Returns the model's positional arguments."""
        length = tokens.shape[1]
        if packed:
            positions = torch.cat([torch.arange(one_length, device=tokens.device) for one_length in packed])[None]
            return tokens, positions, None
        positions = torch.arange(length, device=tokens.device).unsqueeze(0).expand_as(tokens)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        return tokens, positions, mask

    def forward_step(
        self, data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        """Megatron-LM's ``forward_step_func``: (per-token losses, or a schedule plan for combined 1F1B; loss_func)."""
        tokens, labels, *packs = next(data_iterator)
        run = model.build_schedule_plan if return_schedule_plan else model

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = output.float().mean()
            return loss, {"lm loss": loss.detach().clone()}

        return run(*self._inputs(tokens, *packs), labels=labels, **_packed(*packs)), loss_func

    def log_probs_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
        """A ``forward_step_func`` as RL frameworks have it: the model's logits, turned into the labels' log-probs."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        tokens, labels, *packs = next(data_iterator)

        def log_probs(logits: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            by_sequence = logits.float().transpose(0, 1).contiguous()
            losses: torch.Tensor = vocab_parallel_cross_entropy(by_sequence, labels.transpose(0, 1).contiguous())
            return -losses.transpose(0, 1)

        return model(*self._inputs(tokens, *packs), **_packed(*packs)), log_probs

    def _run(self, forward_backward_func: ForwardBackward | None, step: int, **options: Any) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        arguments = {
            "forward_step_func": self.forward_step,
            "data_iterator": self.data_iterator(step),
            "model": self.chunks,
            "num_microbatches": self.workload.microbatches,
            "seq_length": self.workload.seq_length,
            "micro_batch_size": self.workload.micro_batch_size,
            **options,
        }
        return (forward_backward_func or get_forward_backward_func())(**arguments)

    def train_step(self, forward_backward_func: ForwardBackward | None = None) -> list[float]:
        """Runs one step: schedule, gradient reduction, AdamW on megatron-core's main gradients. No stage goes on to the
        optimizer before all are there, as in Megatron-LM, which then reduces the norm of all gradients.

        ``forward_backward_func``: fetched once before the loop, as Megatron-LM does; None: fetched at this call.
        Returns the microbatches' losses on the last stage, an empty list elsewhere.
        """
        from megatron.core import parallel_state

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run(forward_backward_func, self.step, forward_only=False)
        for _, parameter in self._parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        torch.distributed.barrier(parallel_state.get_model_parallel_group())
        self.optimizer.step()
        self.step += 1
        return [loss["lm loss"].item() for loss in losses]

    @torch.no_grad()
    def log_probs_pass(self, forward_backward_func: ForwardBackward | None = None) -> list[torch.Tensor]:
        """Returns log-probs of the next step's labels on the last stage: [micro_batch_size, length] per microbatch."""
        for chunk in self.chunks:
            chunk.eval()
        return self._run(
            forward_backward_func,
            self.step,
            forward_step_func=self.log_probs_step,
            forward_only=True,
            collect_non_loss_data=True,
        )

    @torch.no_grad()
    def evaluate(self, forward_backward_func: ForwardBackward | None = None) -> list[float]:
        """Returns losses of a batch that training never sees; named as Megatron-LM's function is."""
        for chunk in self.chunks:
            chunk.eval()
        losses = self._run(forward_backward_func, -1, forward_only=True)
        return [loss["lm loss"].item() for loss in losses]

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for number, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{number}.{name}", parameter

    def parameter_digest(self) -> str:
        """Returns the sha256 of this rank's parameters, bit by bit."""
        return _digest((name, parameter.detach()) for name, parameter in self._parameters())

    def gradient_digest(self) -> str:
        """Returns the sha256 of this rank's reduced gradients of the last step, bit by bit."""
        return _digest((name, parameter.main_grad) for name, parameter in self._parameters())


def _packed(lengths: tuple[int, ...] = ()) -> dict[str, Any]:
    """Returns what a model gets for packed sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if not lengths:
        return {}
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    return {"packed_seq_params": PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **longest)}


class _PackedAttention(torch.nn.Module):
    """Attention over packed sequences on the CPU, which megatron-core's ``DotProductAttention`` refuses there: causal,
    without dropout. Each sequence is computed by itself, so the time is quadratic in its length, as on a GPU."""

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


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
