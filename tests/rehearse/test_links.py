"""What connects ranks: as a user gives it, as nccl-tests prints it, and what an exchange takes over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaprof.rehearse.links import between, defaults, given

PRINTED = """\
# nThread 1 nGpus 8 minBytes 8 maxBytes 1073741824 step: 2(factor)
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
           8             2     float     sum      -1    18.20    0.00    0.00      0    18.10    0.00    0.00      0
  1073741824     268435456     float     sum      -1   4100.0  261.89  458.30      0   4101.0  261.82  458.19      0
# Avg bus bandwidth    : 229.150
"""


def test_links_are_stated_or_read_from_nccl_tests(tmp_path: Path) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    links = given(["nvlink=400GB/s,5us", f"ib={tmp_path / 'printed'}"])
    stated, read = links["nvlink"], links["ib"]
    assert (stated.bandwidth, stated.latency, stated.known) == (400e9, pytest.approx(5e-6), "stated")
    assert (read.bandwidth, read.latency, read.known) == (458.30e9, pytest.approx(18.2e-6), "measured")


@pytest.mark.parametrize("text", ["nvlink=fast", "nvlink", "ib=0GB/s,1us", "infiniband=50GB/s,1us"])
def test_a_link_that_says_nothing_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--links.*{text.partition('=')[2] or text}"):
        given([text])


def test_a_file_without_links_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text("# no links\n")
    for text in (str(tmp_path / "links.json"), f"ib={tmp_path / 'links.json'}"):
        with pytest.raises(ValueError, match=r"--links.*links\.json"):
            given([text])


def test_an_all_reduce_moves_its_bytes_nearly_twice() -> None:
    (link,) = given(["ib=1GB/s,0us"]).values()
    sent, gathered, reduced = (link.ms(kind, 1_000_000, 4)[0] for kind in ("send", "all_gather", "all_reduce"))
    assert (sent, gathered, reduced) == (pytest.approx(1.0), pytest.approx(0.75), pytest.approx(1.5))


def test_an_assumed_link_is_less_certain_than_a_measured_one(tmp_path: Path) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    measured, assumed = given([f"ib={tmp_path / 'printed'}"])["ib"], defaults("NVIDIA H100 80GB HBM3")["ib"]
    widths = [worst / best for _, best, worst, _ in (link.ms("send", 1 << 30, 2) for link in (measured, assumed))]
    assert widths[0] < widths[1]


def test_ranks_of_several_hosts_take_the_link_between_hosts() -> None:
    links = defaults("NVIDIA A100-SXM4-80GB")
    assert [between(ranks, 8, links).name for ranks in ([0, 7], [7, 8])] == ["nvlink", "ib"]
    assert between([0, 100], 8, defaults(None)).name == "gloo"
