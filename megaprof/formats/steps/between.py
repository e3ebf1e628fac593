"""What a rank did between the first calls of two steps, in a timeline: how long it was in each part of its loop."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megaprof.formats.ranges import GARBAGE, WAITING

_TARGETS = "train_actor", "train_log_probs", "evaluate", "train_overall", "annotated"
#: The parts, by their number in a file, from 1 on.
PARTS = (
    *("optimizer", "evaluation", "saving", "logging", "data", GARBAGE),
    *_TARGETS,
    *("reference", "rollout", "rewards", "weight_sync", "offload", WAITING),
)
#: Those that are other calls of the schedule.
CALLS = frozenset([*_TARGETS, "reference"])
_PART = struct.Struct("<BI")
_ROW = np.dtype([("part", "u1"), ("us", "<u4")])
_MOST = (1 << 32) - 1


def part_of_call(target: str, role: str | None) -> str:
    """Returns the part that a call of the schedule is."""
    return "reference" if (target, role) == ("train_log_probs", "ref") else target


def pack_between(nanoseconds: Mapping[str, int]) -> bytes:
    """Returns five bytes for each known part that took time."""
    known = [(PARTS.index(part) + 1, ns // 1000) for part, ns in nanoseconds.items() if part in PARTS and ns >= 1000]
    return b"".join(_PART.pack(number, min(us, _MOST)) for number, us in known)


def unpack_between(payloads: Sequence[bytes]) -> npt.NDArray[np.float64]:
    """Returns [step, part]: the milliseconds that each of many steps has of each of `PARTS`. A damaged payload has
    none."""
    whole = [payload if len(payload) % _PART.size == 0 else b"" for payload in payloads]
    rows = np.frombuffer(b"".join(whole), dtype=_ROW)
    step = np.repeat(np.arange(len(whole)), [len(payload) // _PART.size for payload in whole])
    known = (rows["part"] > 0) & (rows["part"] <= len(PARTS))
    took_ms = np.zeros((len(whole), len(PARTS)))
    np.add.at(took_ms, (step[known], rows["part"][known] - 1), rows["us"][known] / 1e3)
    return took_ms
