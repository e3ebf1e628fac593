"""How long exchanges would take that a rank alone does not make: bytes, latency, and what is known of a link.

A collective of ``n`` ranks moves its bytes as NCCL's rings do (nccl-tests, doc/PERFORMANCE.md): ``(n - 1) / n`` of
them, twice that for an all-reduce. It takes a link's latency once for each doubling of the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.formats.inputs import read_input

#: What a prediction is made for: what is likely, the best case, the worst case, and exchanges that take no time.
CASES = 4
#: The file with links that `megaprof rehearse --against` measured.
NAME = "links.json"
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_STATED = re.compile(r"([\d.]+)([KMGT]?)B/s,([\d.]+)(us|ms)")
#: The best and the worst case, as factors of the likely time. Data sheets say what nobody reaches.
_FACTORS: dict[str, tuple[float, float]] = {"measured": (0.9, 1.15), "stated": (0.8, 1.5), "assumed": (0.5, 2.0)}


@dataclass(frozen=True)
class Link:
    """What connects two ranks."""

    name: str
    """``nvlink`` or ``gloo`` inside a host, ``ib`` between hosts."""
    bandwidth: float
    """Bytes per second in one direction, as an exchange reaches them."""
    latency: float
    """Seconds of an exchange without bytes."""
    known: Literal["measured", "stated", "assumed"]
    """Whether this was measured, stated by the user, or assumed from a data sheet."""
    source: str
    """Where the numbers are from."""

    def ms(self, kind: str, size: float, ranks: int) -> npt.NDArray[np.float64]:
        """Returns the milliseconds of an exchange of ``size`` bytes among ``ranks`` ranks, in every case. ``kind``:
        ``send``, or the name of a collective. ``size``: of the whole tensor that is gathered, reduced or sent."""
        ring = (ranks - 1) / ranks if kind not in ("send", "recv", "broadcast", "reduce") else 1.0
        moved = (2.0 if kind == "all_reduce" else 1.0) * ring * size
        likely = 1e3 * (self.latency * max(1, (ranks - 1).bit_length()) + moved / self.bandwidth)
        return likely * np.array([1.0, *_FACTORS[self.known], 0.0])


#: By a part of the device's name: bytes per second of NVLink in one direction, and of a GPU's own network card in a DGX
#: (H100: NVLink 900 GB/s both ways, ConnectX-7 400 Gb/s; A100: 600 GB/s, ConnectX-6 200 Gb/s; B200: 1,800 GB/s).
_SHEETS = {"B200": (900e9, 50e9), "H200": (450e9, 50e9), "H100": (450e9, 50e9), "A100": (300e9, 25e9)}


def defaults(device: str | None) -> dict[str, Link]:
    """Returns the links between GPUs of this name, or between processes of the CPU for None. An unknown GPU has none of
    its own: those of an A100 are assumed."""
    if device is None:
        return {"gloo": Link("gloo", 1e9, 300e-6, "assumed", "gloo between processes of one host")}
    sheet = next((name for name in _SHEETS if name in device), "A100")
    inside, between = (0.8 * bandwidth for bandwidth in _SHEETS[sheet])
    said = f"80 % of NVIDIA's data sheet of the {sheet}, for {device}"
    return {"nvlink": Link("nvlink", inside, 5e-6, "assumed", said), "ib": Link("ib", between, 10e-6, "assumed", said)}


def given(texts: Iterable[str]) -> dict[str, Link]:
    """Returns the links that a user gives: ``nvlink=400GB/s,5us``, ``ib=FILE`` with what nccl-tests printed, or the
    file that an earlier comparison kept. Raises ValueError, which names the text."""
    links: dict[str, Link] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if equals and name not in ("nvlink", "ib", "gloo"):
                raise ValueError("NAME must be nvlink, ib, or on the CPU gloo")
            if stated := _STATED.fullmatch(value):
                bandwidth, unit, latency, scale = stated.groups()
                seconds = float(latency) * (1e-3 if scale == "ms" else 1e-6)
                links[name] = Link(name, float(bandwidth) * _UNITS[unit], seconds, "stated", f"--links {text}")
            elif equals:
                # What nccl-tests print: the bus bandwidth of the largest size, and the time of the smallest.
                rows = [line.split() for line in read_input(Path(value)).decode("utf-8", "replace").splitlines()]
                rows = [row for row in rows if len(row) >= 9 and row[0].isdigit()]
                sizes = [(int(row[0]), float(row[5]), float(row[7])) for row in rows]
                if not sizes:
                    raise ValueError("no line has the columns size, count, type, redop, root, time, algbw, busbw")
                found = max(sizes)[2] * 1e9, min(sizes)[1] * 1e-6
                links[name] = Link(name, *found, "measured", f"nccl-tests, {value}")
            else:
                links |= msgspec.json.decode(read_input(Path(text)), type=dict[str, Link])
        except (OSError, ValueError) as fault:
            raise ValueError(
                f"--links {text}: neither NAME=BANDWIDTH,LATENCY such as nvlink=400GB/s,5us, nor NAME=FILE with the "
                f"output of nccl-tests, nor a {NAME} of megaprof rehearse ({fault})"
            ) from None
        if name in links and links[name].bandwidth <= 0:
            raise ValueError(f"--links {text}: the bandwidth must be more than 0")
    return links


def between(ranks: Sequence[int], per_host: int, links: Mapping[str, Link]) -> Link:
    """Returns the link that ranks exchange over: the one between hosts (``ib``) if they are on several."""
    inside = next(link for name, link in links.items() if name != "ib")
    return inside if len({rank // per_host for rank in ranks}) == 1 else links.get("ib", inside)
