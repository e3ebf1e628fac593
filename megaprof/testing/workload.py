"""The description of the small GPT that `megaprof.testing.gpt` builds: sizes, parallelism, layout, batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

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
    """Model chunks per stage; None: one, scheduled without interleaving."""
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
    seq_lengths: tuple[int, ...] | None = None
    """Tokens in a sequence of each microbatch, if they differ, as in RL frameworks; ``seq_length`` is the longest."""
    packs: tuple[tuple[int, ...], ...] | None = None
    """Tokens of every sequence that is packed into each microbatch, if any are: for the microbatches of one replica, or
    of all of them, replica after replica. Attention stays within a sequence."""
    hidden: int = 256
    """Hidden size. With the defaults, a layer costs far more than the embedding or the output layer."""
    heads: int = 4
    """Attention heads."""
    vocab: int = 128
    """Vocabulary size."""
    num_experts: int | None = None
    """Experts per layer of a mixture of experts; None: dense layers, or 2 x ``ep`` if ep > 1."""
    combined_1f1b: bool = False
    """Overlap expert communication with compute (``overlap_moe_expert_parallel_comm``), which needs megatron-core >=
    0.14, ep > 1, bfloat16, and chunks (``vpp``) where pp > 1."""
    overlap_p2p: bool | None = None
    """Send and receive while computing (``overlap_p2p_comm``); None: wherever ``vpp`` is set, as Megatron-LM does. The
    other way of the interleaved schedule, batched exchanges, needs pp > 2: with two stages both directions go to the
    same peer, and which message is received for which is undefined."""
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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < (0 if field.name == "seed" else 1):
                raise ValueError(f"{field.name}={value}: must be positive")
        self._check_model()
        self._check_layout()
        self._check_schedule()

    def _check_model(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(_DTYPES)}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden}: must be a multiple of heads={self.heads}")
        for name in ("heads", "vocab"):
            if getattr(self, name) % self.tp:
                raise ValueError(f"tp={self.tp}: must divide {name}={getattr(self, name)}")
        if self.layer_ms is not None and not all(ms >= 0 for ms in self.layer_ms):
            raise ValueError(f"layer_ms={self.layer_ms}: must not be negative")
        if self.layer_ms is not None and self.combined_1f1b:
            raise ValueError(f"layer_ms={self.layer_ms}: needs combined_1f1b=False, which runs parts of layers")
        if self.num_experts is not None and self.num_experts % self.ep:
            raise ValueError(f"num_experts={self.num_experts}: must be a multiple of ep={self.ep}")
        if self.dp is not None and self.dp % self.ep:
            raise ValueError(f"dp={self.dp}: must be a multiple of ep={self.ep}, whose ranks are taken from it")

    def _check_layout(self) -> None:
        pieces = self.pp * (self.vpp or 1)
        if self.layout is None:
            if self.layers % pieces:
                raise ValueError(
                    f"layers={self.layers}: must be a multiple of the {pieces} chunks (pp x vpp), or give a layout"
                )
        elif len(self.layout) != pieces:
            raise ValueError(f"layout={self.layout}: must have {pieces} numbers (pp x vpp), has {len(self.layout)}")
        elif min(self.layout) < 0 or sum(self.layout) != self.layers:
            raise ValueError(
                f"layout={self.layout}: must be layer counts with sum layers={self.layers}, not {sum(self.layout)}"
            )

    def _check_schedule(self) -> None:
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp}: needs pp > 1, as the interleaved schedule does")
        if self.vpp is not None and self.microbatches % self.pp:
            raise ValueError(f"microbatches={self.microbatches}: must be a multiple of pp={self.pp} when vpp is set")
        if self.overlap_p2p and self.vpp is None:
            raise ValueError("overlap_p2p=True: needs vpp, only the interleaved schedule overlaps")
        if self.overlap_p2p is False and self.vpp is not None and self.pp == 2:
            raise ValueError("overlap_p2p=False: needs pp > 2 where vpp is set (pp=2), as in Megatron-LM")
        if self.seq_lengths is not None:
            if len(self.seq_lengths) != self.microbatches:
                raise ValueError(f"seq_lengths={self.seq_lengths}: must have microbatches={self.microbatches} numbers")
            if min(self.seq_lengths) < 1 or max(self.seq_lengths) > self.seq_length:
                raise ValueError(f"seq_lengths={self.seq_lengths}: must lie in 1..seq_length={self.seq_length}")
        if self.packs is not None:
            if len(self.packs) not in (self.microbatches, self.microbatches * (self.dp or self.ep)):
                raise ValueError(
                    f"packs={self.packs}: must have microbatches={self.microbatches} items, or so many for each replica"
                )
            if self.seq_lengths is not None or self.micro_batch_size > 1 or self.tp > 1 or self.combined_1f1b:
                raise ValueError("packs: needs micro_batch_size=1, tp=1, no seq_lengths and no combined_1f1b")
            if any(not lengths or min(lengths) < 1 or sum(lengths) > self.seq_length for lengths in self.packs):
                raise ValueError(f"packs={self.packs}: each must hold 1 to seq_length={self.seq_length} tokens in all")
        if self.sequence_parallel:
            if self.seq_length % self.tp:
                raise ValueError(f"seq_length={self.seq_length}: must be a multiple of tp={self.tp} with experts")
            if self.seq_lengths is not None or self.combined_1f1b:
                # Both need the all-to-all dispatcher, see ``dispatcher``.
                name = "combined_1f1b" if self.combined_1f1b else "seq_lengths"
                raise ValueError(f"{name}={getattr(self, name)}: needs tp=1 with experts, not tp={self.tp}")
        if self.combined_1f1b:
            if self.ep == 1:
                raise ValueError("combined_1f1b=True: needs ep > 1, it overlaps expert parallel communication")
            if self.dtype != "bfloat16":
                raise ValueError(f"combined_1f1b=True: needs dtype='bfloat16', not {self.dtype!r}")
            if self.pp > 1 and self.vpp is None:
                raise ValueError(f"combined_1f1b=True: needs vpp where pp > 1 (pp={self.pp})")

    @property
    def experts(self) -> int | None:
        """Experts per layer; None for dense layers."""
        return self.num_experts or (2 * self.ep if self.ep > 1 else None)

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on: megatron-core demands it if there are experts and tensor parallelism."""
        return self.tp > 1 and self.experts is not None

    @property
    def dispatcher(self) -> str:
        """Megatron-core's token dispatcher. The all-to-all one gathers unevenly over TP, which gloo cannot do."""
        return "allgather" if self.sequence_parallel else "alltoall"

    @property
    def world_size(self) -> int:
        """Ranks that `build` needs."""
        return self.tp * self.pp * (self.dp or self.ep)

    @property
    def chunk_layers(self) -> tuple[int, ...]:
        """Layers of every chunk, chunk-major, even if ``layout`` is None."""
        pieces = self.pp * (self.vpp or 1)
        return self.layout or (self.layers // pieces,) * pieces

    @property
    def layout_string(self) -> str:
        """``chunk_layers`` in the language of ``--pipeline-model-parallel-layout``."""
        pieces = ["t" * layers for layers in self.chunk_layers]
        pieces[0] = "E" + pieces[0]
        pieces[-1] += "L"
        return "|".join(pieces)
