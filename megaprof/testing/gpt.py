"""A small GPT of megatron-core's own classes, trained by megatron-core's own schedules: something real to measure.

A `GPTWorkload` describes it: sizes, parallelism, layout, batch. `build` makes that model, in an initialised process.
`BuiltGPT` trains it, evaluates it and computes log-probs, as Megatron-LM and the RL frameworks based on it do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megaprof.testing.faults import layers, pace

ForwardBackward = Callable[..., list[Any]]
"""What ``megatron.core.pipeline_parallel.get_forward_backward_func()`` returns."""

#: With this part of a core, a layer has computed long before 24 ms have passed, and it waits at most so many times.
_ENOUGH, _MOST_TIMES = 0.25, 8.0
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class GPTWorkload:
    """Model, parallel sizes and batch of a run. Every value is checked here, before any rank starts.

    Raises ValueError, naming the field, its value and what would be valid.
    """

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int | None = None
    """Model chunks per stage, which exchange while they compute (``overlap_p2p_comm``), as in Megatron-LM; None: one,
    scheduled without interleaving."""
    ep: int = 1
    """Expert parallel size."""
    dp: int | None = None
    """Data parallel size; None: the smallest that ``ep`` allows."""
    layers: int = 8
    """Transformer layers of the whole model."""
    layout: tuple[int, ...] | None = None
    """Layers of every chunk, chunk-major (first chunks of all stages, then second chunks, ...), ``pp`` x ``vpp``
    numbers; None: the same everywhere."""
    microbatches: int = 4
    """In one step of one data parallel replica."""
    micro_batch_size: int = 1
    """Sequences in a microbatch."""
    seq_length: int = 128
    """Tokens in a sequence."""
    hidden: int = 256
    """Hidden size. With the defaults, a layer costs far more than the embedding or the output layer."""
    heads: int = 4
    """Attention heads."""
    vocab: int = 128
    """Vocabulary size."""
    num_experts: int | None = None
    """Experts per layer of a mixture of experts; None: dense layers, or 2 x ``ep`` if ep > 1."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while computing, with megatron-core's no_sync around all but the last microbatch."""
    seed: int = 1234
    """Seed of weights and data."""
    dtype: str = "float32"
    """``float32`` or ``bfloat16``."""
    layer_ms: tuple[float, float] | None = None
    """Milliseconds of a layer's forward and of its backward. The layer waits until they have passed, as a host waits
    for a GPU, so other work on the machine hardly changes them. None: as long as it computes."""
    patient: bool = False
    """Whether layers wait longer than ``layer_ms`` on a busy machine: on all ranks, up to 8 times, in proportion to how
    much less than a quarter of a core a rank got while it started, which Linux counts."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further options of megatron-core's TransformerConfig, which checks them itself."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if type(value) is int and value < (0 if each.name == "seed" else 1):
                raise ValueError(f"{each.name}={value}: must be positive")
        tp, ep, pieces, layout = self.tp, self.ep, self.pp * (self.vpp or 1), self.layout
        experts, ms = self.experts, self.layer_ms
        for is_wrong, message in (
            (self.dtype not in _DTYPES, f"dtype={self.dtype!r}: must be one of {', '.join(_DTYPES)}"),
            (self.hidden % self.heads, f"hidden={self.hidden}: must be a multiple of heads={self.heads}"),
            (self.heads % tp, f"tp={tp}: must divide heads={self.heads}"),
            (self.vocab % tp, f"tp={tp}: must divide vocab={self.vocab}"),
            (ms is not None and not all(each >= 0 for each in ms), f"layer_ms={ms}: must not be negative"),
            ((experts or ep) % ep, f"num_experts={experts}: must be a multiple of ep={ep}"),
            ((self.dp or ep) % ep, f"dp={self.dp}: must be a multiple of ep={ep}, whose ranks are taken from it"),
            (
                layout is None and self.layers % pieces,
                f"layers={self.layers}: must be a multiple of the {pieces} chunks (pp x vpp), or give a layout",
            ),
            (
                layout is not None and len(layout) != pieces,
                f"layout={layout}: must have {pieces} numbers (pp x vpp), has {len(layout or ())}",
            ),
            (
                layout is not None and (min(layout, default=-1) < 0 or sum(layout) != self.layers),
                f"layout={layout}: must be layer counts with sum layers={self.layers}, not {sum(layout or ())}",
            ),
            (self.vpp and self.pp == 1, f"vpp={self.vpp}: needs pp > 1, as the interleaved schedule does"),
            (
                self.vpp and self.microbatches % self.pp,
                f"microbatches={self.microbatches}: must be a multiple of pp={self.pp} when vpp is set",
            ),
            (
                self.sequence_parallel and self.seq_length % tp,
                f"seq_length={self.seq_length}: must be a multiple of tp={tp} with experts",
            ),
        ):
            if is_wrong:
                raise ValueError(message)

    @property
    def experts(self) -> int | None:
        """Experts per layer; None for dense layers."""
        return self.num_experts or (2 * self.ep if self.ep > 1 else None)

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on: megatron-core demands it if there are experts and tensor parallelism."""
        return self.tp > 1 and self.experts is not None

    @property
    def world_size(self) -> int:
        """Ranks that `build` needs."""
        return self.tp * self.pp * (self.dp or self.ep)

    @property
    def chunk_layers(self) -> tuple[int, ...]:
        """Layers of every chunk, chunk-major, even if ``layout`` is None."""
        pieces = self.pp * (self.vpp or 1)
        return self.layout or (self.layers // pieces,) * pieces


def _layout_options(workload: GPTWorkload) -> dict[str, Any]:
    """Returns the options of TransformerConfig that give this layout."""
    from megatron.core.transformer.transformer_config import TransformerConfig

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
    if "pipeline_model_parallel_layout" in inspect.signature(TransformerConfig).parameters:
        pieces = ["t" * layers for layers in layout]
        return {"pipeline_model_parallel_layout": "|".join(["E" + pieces[0], *pieces[1:-1], pieces[-1] + "L"])}
    raise ValueError(
        f"layout={layout}: this megatron-core has no pipeline_model_parallel_layout (0.13+ has); it can only give the "
        f"first and the last of {pp} stages layers of their own, the same in each of a stage's {vpp} chunks"
    )


def _config(workload: GPTWorkload) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, workload.dtype)
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
        "overlap_p2p_comm": workload.vpp is not None,
        "batch_p2p_comm": workload.vpp is None,
        "num_moe_experts": workload.experts,
        # The all-to-all dispatcher gathers unevenly over TP, which gloo cannot do.
        "moe_token_dispatcher_type": "allgather" if workload.sequence_parallel else "alltoall",
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Fused kernels are CUDA's.
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "finalize_model_grads_func": finalize_model_grads,
        **_layout_options(workload),
        **workload.options,
    }
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
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=workload.experts, moe_grouped_gemm=False),
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
    share = 1.0  # of a core, which this thread got while it could run. Starting a rank takes seconds of computing
    with contextlib.suppress(OSError, ValueError):  # the system does not count it
        ran_ns, waited_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
        share = max(ran_ns, 1) / max(ran_ns + waited_ns, 1)
    times = torch.tensor([_ENOUGH / share], device=device).clamp(1.0, _MOST_TIMES)
    torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MAX)
    forward_ms, backward_ms = (ms * times.item() for ms in workload.layer_ms)
    if times.item() > 1.0 and torch.distributed.get_rank() == 0:
        said = f"This machine is busy: each layer waits {forward_ms:.0f} ms forward and {backward_ms:.0f} ms backward."
        print(said, file=sys.stderr, flush=True)
    return forward_ms, backward_ms


class BuiltGPT:
    """This rank's chunks of a `GPTWorkload`, ready to run.

    Attributes:
        chunks: the model chunks, megatron-core's DistributedDataParallel around GPTModel; what a host passes on as
            ``model``.
        config: their TransformerConfig.
        lengths: tokens in a sequence of each microbatch. They may differ, as in RL frameworks, up to ``seq_length``, if
            the workload has the option ``variable_seq_lengths``.
        optimizer: AdamW over the chunks' parameters.
        step: the next training step, from 0.
    """

    def __init__(self, workload: GPTWorkload, config: Any, chunks: list[Any]) -> None:
        self.workload = workload
        self.config = config
        self.chunks = chunks
        self.lengths = (workload.seq_length,) * workload.microbatches
        self.optimizer = torch.optim.AdamW(parameter for chunk in chunks for parameter in chunk.parameters())
        self.step = 0

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
        # A generator of its own: data must not move the random state that the model draws from.
        seed = hashlib.sha256(f"{workload.seed} {step} {parallel_state.get_data_parallel_rank()}".encode()).digest()
        device = next(self.chunks[0].parameters()).device
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        multiplier = next(number for number in range(5, workload.vocab + 6) if math.gcd(number, workload.vocab) == 1)
        for length in self.lengths:
            tokens = torch.randint(workload.vocab, (workload.micro_batch_size, length), generator=generator).to(device)
            yield tokens, (tokens * multiplier + 1) % workload.vocab

    @staticmethod
    def _inputs(tokens: torch.Tensor) -> tuple[Any, ...]:
        """Returns the model's positional arguments."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).unsqueeze(0).expand_as(tokens)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        return tokens, positions, mask

    def forward_step(
        self, data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        """Megatron-LM's ``forward_step_func``: (per-token losses, or a schedule plan for combined 1F1B; loss_func)."""
        tokens, labels = next(data_iterator)
        run = model.build_schedule_plan if return_schedule_plan else model
        return run(*self._inputs(tokens), labels=labels), mean_loss

    def log_probs_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
        """A ``forward_step_func`` as RL frameworks have it: the model's logits, turned into the labels' log-probs."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        tokens, labels = next(data_iterator)

        def log_probs(logits: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            by_sequence = logits.float().transpose(0, 1).contiguous()
            losses: torch.Tensor = vocab_parallel_cross_entropy(by_sequence, labels.transpose(0, 1).contiguous())
            return -losses.transpose(0, 1)

        return model(*self._inputs(tokens)), log_probs

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
        for parameter in (parameter for chunk in self.chunks for parameter in chunk.parameters()):
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


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron-LM's ``loss_func``: the loss of a microbatch, and what is reported of it."""
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}
