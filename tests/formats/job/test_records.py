from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprof.formats.files import Owner
from megaprof.formats.job import records
from megaprof.formats.job.records import Absent, BadRecord
from tests.control import places

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), JSON))
def test_what_is_written_is_read(record: dict[str, Any]) -> None:
    assert records.decode(records.encode(record)) == record
    assert json.loads(records.encode(record))["data"] == record, "people read it as plain JSON"


@settings(max_examples=40)
@given(st.dictionaries(st.text(), JSON), st.data())
def test_no_part_of_a_record_is_taken_for_whole(record: dict[str, Any], data: Any) -> None:
    content = records.encode(record)
    cut = data.draw(st.integers(0, len(content) - 2))
    with pytest.raises(BadRecord):
        records.decode(content[:cut])


@given(st.binary(max_size=300))
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(BadRecord):
        records.decode(content)


def test_overwriting_leaves_nothing_of_the_longer_record_before(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    places.overwrite(path, {"text": "long " * 50}, 512)
    places.overwrite(path, {"text": "short"}, 512)
    assert places.read(path) == {"text": "short"}
    assert path.stat().st_size == 512
    with pytest.raises(ValueError, match="does not fit into 16"):
        places.overwrite(path, {"text": "short"}, 16)


def test_a_reader_sees_one_record_or_another_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    places.overwrite(path, {"n": 0}, 2048)
    done = threading.Event()

    def keep_writing() -> None:
        for n in range(2000):
            places.overwrite(path, {"n": n, "pad": "x" * (n % 1500)}, 2048)
        done.set()

    writer = threading.Thread(target=keep_writing)
    writer.start()
    seen = []
    while not done.is_set():
        try:
            seen.append(places.read(path)["n"])
        except BadRecord:
            continue
    writer.join()
    assert seen == sorted(seen)


def test_absent_is_no_fault(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "none" / "below"):
        with pytest.raises(Absent):
            places.read(path)


def test_a_directory_that_cannot_hold_it_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        places.write(tmp_path / "taken", {})
    assert os.listdir(tmp_path) == ["taken"]


def test_owner_is_who_our_own_files_belong_to(tmp_path: Path) -> None:
    """Also where that is another user than we are, as on a file system that turns root into nobody."""
    path = tmp_path / "request.json"
    owner = places.write(path, {"a": 1}, mode=0o600)
    assert places.read(path, owner) == {"a": 1}
    with pytest.raises(BadRecord, match="belongs to user"):
        places.read(path, Owner(owner.uid + 1))
    path.chmod(0o666)
    with pytest.raises(BadRecord, match="by others"):
        places.read(path, Owner(owner.uid))
    assert places.read(path, Owner(owner.uid, 0o022)) == {"a": 1}, "a file system that ignores permissions"
