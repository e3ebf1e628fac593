from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats.job import Count, Record, decode
from tests.control import places


class Text(Record, frozen=True):
    number: Count
    text: str = ""


@given(st.integers(0, 1 << 62), st.text(), st.data())
def test_a_record_is_read_as_it_was_written_and_no_part_of_it_is_taken_for_whole(
    number: int, text: str, data: st.DataObject
) -> None:
    content = msgspec.json.encode(Text(number, text))
    assert decode(content, Text) == Text(number, text)
    with pytest.raises(ValueError, match="is damaged"):
        decode(content[: data.draw(st.integers(0, len(content) - 1))], Text)


@given(st.binary(max_size=300))
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="is damaged"):
        decode(content, Text)


@pytest.mark.parametrize("other", [b'{"number":1,"version":1}', b'{"crc32":"00000000","data":{"number":1}}'])
def test_a_record_of_another_version_is_refused_and_a_field_more_is_not(other: bytes) -> None:
    with pytest.raises(ValueError, match="another version of megaprof"):
        decode(other, Text)
    assert decode(b'{"number":1,"version":2,"more":[]}', Text) == Text(1)


def test_a_reader_sees_one_record_or_another_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    places.write(path, Text(0))
    done = threading.Event()

    def keep_writing() -> None:
        for number in range(500):
            places.write(path, Text(number, "x" * (number * 13 % 1500)))
        done.set()

    writer = threading.Thread(target=keep_writing)
    writer.start()
    seen = []
    while not done.is_set():
        seen.append(places.read(path, Text).number)
    writer.join()
    assert seen == sorted(seen)


def test_a_directory_that_cannot_hold_it_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        places.write(tmp_path / "taken", Text(1))
    assert os.listdir(tmp_path) == ["taken"]
