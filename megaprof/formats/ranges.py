"""Range names: one grammar, written by the hooks and parsed back by the analysis.

The same name goes to NVTX (domain ``megaprof``) and to the torch trace::

    megaprof/train_actor step=12 pp=1 tp=0 cp=0 ep=0 dp=0     the outermost range, one per schedule call
    megaprof/forward mb=3 chunk=0                             one microbatch on one model chunk
    megaprof/backward mb=3 chunk=0
    megaprof/combined mb=4 chunk=0 bmb=3 bchunk=0             combined 1F1B: forward of one, backward of another
    megaprof/send_forward mb=3 chunk=0                        a pipeline exchange, named as Megatron names it
    megaprof/send_forward_recv_backward mb=3 chunk=0 bmb=1 bchunk=0    both directions: of a forward, of a backward
    megaprof/wait_recv_prev mb=3 chunk=0                      the wait for an overlapped one
    megaprof/data_wait mb=3 chunk=0                           a forward waits for its data
    megaprof/garbage_collection                               Python collected its oldest objects
    megaprof/layer n=5                                        one module's forward, in Megatron's layer numbers (from 1)
    megaprof/attention_backward n=5                           its backward
    megaprof/experts mtp=1 n=1                                the same inside multi-token prediction layer 1
    megaprof/token_dispatch n=5                               a step of the MoE token dispatcher, as Megatron names it
    megaprof/role/ref                                         work of a role, where the file's name does not tell it
    megaprof/role/ref/compute_log_prob                        an annotated function or block of a role
    megaprof/annotated/load_batch                             an annotated function or block without a role

A name is a label and ``key=value`` fields, separated by single spaces. A value that is not known is ``?``, and is read
back as ``None``. A module's forward that runs inside a ``backward`` is a recomputation.

An exchange has the microbatch and chunk, as this rank numbers them, of the pass whose result it sends, or, in a
direction in which it only receives, of the next pass. Traces of earlier versions have neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from megaprof.parallel.schedules import EXCHANGES, SendReceive

if TYPE_CHECKING:
    from megaprof.parallel.topology import RankCoords

PREFIX = "megaprof/"
DOMAIN = "megaprof"
#: The key of `GraphNames` in a trace.
GRAPHS_KEY = "megaprof_graphs"

FORWARD = "forward"
BACKWARD = "backward"
COMBINED = "combined"
#: The passes of a microbatch.
PASSES = (FORWARD, BACKWARD, COMBINED)
FINALIZE_GRADS = "finalize_grads"
#: One ``next`` of the data iterator that the host gave to the schedule.
DATA_WAIT = "data_wait"
#: A collection of Python's oldest objects, whoever ran it.
GARBAGE = "garbage_collection"
#: A process that does what another one asks for has nothing to do.
WAITING = "waiting"

#: Microbatch and model chunk of a pass; None for each that is not known.
OfPass = tuple["int | None", "int | None"]

#: Megatron's exchanges between stages, in every version from 0.12.
P2P_OPERATIONS = tuple(EXCHANGES)
#: Prefix of the range in which an overlapped exchange (``overlap_p2p_comm``) is waited for, e.g. ``wait_recv_prev``.
WAIT = "wait_"
WAIT_ANY = WAIT + "exchange"

#: Modules by their role in megatron-core's module tree (0.12 to 0.19), whatever class implements them.
EMBEDDING = "embedding"
LAYER = "layer"
MTP_LAYER = "mtp_layer"
OUTPUT_LAYER = "output_layer"
#: Attributes of a multimodal model that hold what runs in front of its language model (LLaVA's, on the first stage).
ENCODERS = ("vision_model", "vision_projection")
#: What is no part of a layer.
OUTER_MODULES = frozenset((EMBEDDING, LAYER, MTP_LAYER, OUTPUT_LAYER, *ENCODERS))
#: Attributes of a layer that hold its parts, and the label of each.
LAYER_PARTS = {"self_attention": "attention", "cross_attention": "cross_attention", "mixer": "mixer", "mlp": "mlp"}
#: Attributes of a mixture-of-experts ``mlp`` that are modules.
EXPERTS = "experts"
MOE_PARTS = ("router", EXPERTS, "shared_experts")
#: Methods of its ``token_dispatcher`` (no module): the first two up to 0.12, the others from 0.13.
DISPATCHER_STEPS = (
    "token_permutation",
    "token_unpermutation",
    "dispatch_preprocess",
    "token_dispatch",
    "dispatch_postprocess",
    "combine_preprocess",
    "token_combine",
    "combine_postprocess",
)
MODULES = OUTER_MODULES.union(LAYER_PARTS.values(), MOE_PARTS, DISPATCHER_STEPS)

_BACKWARD_OF_MODULE = "_backward"
_ROLE = "role/"
_ANNOTATED = "annotated/"
_LONGEST_WORDS = 120
_UNKNOWN = "?"
_LABEL = re.compile(r"[^\s=/][^\s=]*")
_NO_LABEL = re.compile(r"[\s=/\x00-\x1f]+")


@dataclass(frozen=True)
class RangeName:
    """A parsed range name: a label and integer fields (``None`` if not known). ``str`` writes it."""

    label: str
    fields: dict[str, int | None]

    def __str__(self) -> str:
        fields = (f" {key}={_UNKNOWN if number is None else number}" for key, number in self.fields.items())
        return f"{PREFIX}{self.label}" + "".join(fields)

    @property
    def module(self) -> str | None:
        """The label of the module (one of ``MODULES``) whose forward or backward it is; None for other ranges."""
        label = self.label.removesuffix(_BACKWARD_OF_MODULE)
        return label if label in MODULES else None

    @property
    def is_module_backward(self) -> bool:
        return self.module is not None and self.label.endswith(_BACKWARD_OF_MODULE)

    @property
    def role(self) -> str | None:
        """The role of a role range or of an annotation; None if the name has none."""
        return self.label.removeprefix(_ROLE).partition("/")[0] if self.label.startswith(_ROLE) else None


def transfers(label: str) -> tuple[str, ...]:
    """Returns what is exchanged in a range with this label, as fields of `SendReceive`; empty for other ranges. If the
    handle of an exchange has no name of its own, waiting for it may be waiting for any of them."""
    if not label.startswith(WAIT):
        return EXCHANGES.get(label, ())
    return tuple(transfer for transfer in SendReceive._fields if label in (WAIT + transfer, WAIT_ANY))


def step_range(target: str, step: int, coords: RankCoords) -> str:
    """Returns the name of the outermost range of one schedule call."""
    coordinates = f"pp={coords.pp} tp={coords.tp} cp={coords.cp} ep={coords.ep} dp={coords.dp}"
    return f"{PREFIX}{target} step={step} {coordinates}"


def exchange_range(operation: str, *passes: OfPass) -> str:
    """Returns the name of a pipeline exchange or a wait, with the microbatch and model chunk of each pass that it is
    for: a forward's before a backward's."""
    fields: dict[str, int | None] = {}
    for prefix, (microbatch, chunk) in zip(("", "b"), passes, strict=False):
        fields |= {f"{prefix}mb": microbatch, f"{prefix}chunk": chunk}
    return str(RangeName(operation, fields))


def module_range(label: str, number: int | None, mtp: int | None = None) -> RangeName:
    """Returns the name of one forward of a module in layer ``number``, or in that layer of MTP layer ``mtp``."""
    return RangeName(label, {"n": number} if mtp is None else {"mtp": mtp, "n": number})


def module_backward(name: str) -> str:
    """Returns the name of the backward of the module whose forward is called ``name``."""
    label, space, tail = name.partition(" ")
    return f"{label}{_BACKWARD_OF_MODULE}{space}{tail}"


def role_range(role: str) -> str:
    """Returns the name of a stretch of a role's work. Characters that a label cannot hold become ``_``."""
    return f"{PREFIX}{_ROLE}{_words(role)}"


def annotation_range(message: str, role: str | None) -> str:
    """Returns the name of an annotated function or block."""
    return f"{role_range(role)}/{_words(message)}" if role else f"{PREFIX}{_ANNOTATED}{_words(message)}"


def parse(name: str) -> RangeName | None:
    """Reads a range name; ``None`` if ``name`` is not one of ours. Never raises."""
    if not name.startswith(PREFIX):
        return None
    label, *parts = name[len(PREFIX) :].split(" ")
    if not _LABEL.fullmatch(label):
        return None
    fields: dict[str, int | None] = {}
    for part in parts:
        key, separator, value = part.partition("=")
        if not separator or not key or key in fields:
            return None
        if value == _UNKNOWN:
            fields[key] = None
        elif value.isascii() and value.isdigit() and len(value) < 19:
            fields[key] = int(value)
        else:
            return None
    return RangeName(label, fields)


@dataclass(frozen=True)
class GraphNames:
    """The ranges in which the nodes of CUDA graphs were captured. A replay runs no Python, so a trace has only the
    graph and the node of each kernel, and these names once, under a key of their own."""

    stacks: tuple[tuple[str, ...], ...]
    """Range names around a node, the outermost first; each combination once."""
    runs: tuple[tuple[int, int, int], ...]
    """First node, last node, and the index of their stack, in order. A node's number is Kineto's ``graph node id``: the
    graph in the upper 32 bits, the node in the lower ones, in the order of capture."""


def graph_names(nodes: Mapping[int, tuple[str, ...]]) -> str:
    """Returns ``nodes``, the ranges around each node by its number, as JSON. Consecutive nodes with the same ranges are
    one run, so the JSON grows with the ranges of a graph and not with its kernels."""
    stacks: dict[tuple[str, ...], int] = {}
    runs: list[list[int]] = []
    for node in sorted(nodes):
        stack = stacks.setdefault(nodes[node], len(stacks))
        if runs and runs[-1][2] == stack and runs[-1][1] >> 32 == node >> 32:
            runs[-1][1] = node
        else:
            runs.append([node, node, stack])
    return json.dumps({"stacks": list(stacks), "runs": runs}, separators=(",", ":"))


def read_graph_names(text: bytes) -> GraphNames:
    """Reads what `graph_names` returned. Raises ValueError for anything else."""
    try:
        names = msgspec.json.decode(text, type=GraphNames)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ValueError(str(fault)) from None
    previous_last = -1
    for first_node, last_node, stack in names.runs:
        if not (previous_last < first_node <= last_node < 1 << 63 and 0 <= stack < len(names.stacks)):
            raise ValueError("its runs of nodes are not in order")
        previous_last = last_node
    return names


def _words(text: str) -> str:
    clean = _NO_LABEL.sub("_", text)[:_LONGEST_WORDS].encode("utf-8", "replace").decode()
    return clean or "_"
