"""The lowest rank's part: it alone reads requests, admits one at a time, and says of each other one why not.

That is why concurrent requests need no lock: what all ranks look at is only what the gate lets through.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megaprof.control import records
from megaprof.control.paths import REQUEST_ID, Paths
from megaprof.control.records import Absent, BadRecord, Owner
from megaprof.control.request import Refused, Request
from megaprof.control.run import Run
from megaprof.runtime.logs import logger

#: How many entries one look goes through, and how many requests it judges.
_LOOKED_AT = 4096
_JUDGED = 64
#: Answers of this many requests are kept.
_KEPT = 256
#: How long an admitted request keeps others out after nobody waits for it any more.
_GRACE = 30.0


class Gate:
    """``current`` is the request that is being carried out, None when there is none."""

    def __init__(self, paths: Paths, run: Run, owner: Owner) -> None:
        self._paths = paths
        self._run = run
        self._owner = owner
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._stuck: set[str] = set()
        self._until = 0.0
        self.current: Request | None = None
        self._open()

    def _open(self) -> None:
        """Remove what an earlier run left; nobody asks before ``run.json`` is there."""
        for directory in (self._paths.orders, self._paths.answers):
            shutil.rmtree(directory, ignore_errors=True)
        self._make()

    def _make(self) -> None:
        for directory in (self._paths.orders, self._paths.answers):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._paths.requests.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.chmod(self._paths.requests, 0o700)
        except PermissionError as fault:
            reason = f"{self._paths.requests} belongs to another user: remove it"
            raise PermissionError(fault.errno, reason) from None

    def look(self) -> None:
        """Judge what has come in since the last time. Raises OSError where the directory does not answer."""
        self._settle()
        try:
            names = sorted(self._names())
        except FileNotFoundError:  # somebody has cleaned up
            self._make()
            return
        for name in names:
            path = self._paths.requests / name
            identity = name.removesuffix(".json")
            if not name.endswith(".json") or REQUEST_ID.fullmatch(identity) is None:
                self._remove(path)
                continue
            try:
                self._judge(identity, path)
            except Absent:
                continue
            except (Refused, BadRecord) as fault:
                reason = f"the request {fault}" if isinstance(fault, BadRecord) else str(fault)
                logger.info("megaprof: request %s is refused: %s", identity, reason)
                self._refuse(identity, reason)
            self._remove(path)

    def _names(self) -> Iterator[str]:
        judged = 0
        with os.scandir(self._paths.requests) as entries:
            for looked_at, entry in enumerate(entries):
                if judged == _JUDGED or looked_at == _LOOKED_AT:
                    return
                # A name with a dot is a request that is being written.
                if not entry.name.startswith(".") and entry.name not in self._stuck:
                    judged += 1
                    yield entry.name

    def _judge(self, identity: str, path: Path) -> None:
        if self.current is not None and self.current.id == identity:
            return  # the same once more: it is being carried out
        record = records.read(path, self._owner)
        if record.get("id") != identity:
            raise Refused("the request's id is not its file's name")
        if identity in self._answered:
            raise Refused("a request of this id was answered before")
        request = Request.from_record(record, self._run)
        if self.current is not None:
            raise Refused(f"busy with {self.current.id} ({self.current.by}), which asks for {self.current.target}")
        self._answers(identity)
        try:
            self._paths.orders.mkdir(mode=0o755, exist_ok=True)
            records.write(self._paths.order(identity), request.as_record())
        except OSError as fault:
            raise Refused(f"{self._paths.orders} cannot be written: {fault.strerror}") from None
        self.current = request
        self._until = time.monotonic() + request.timeout + _GRACE
        logger.info("megaprof: request %s (%s) is carried out: %s", identity, request.by, request.target)

    def _settle(self) -> None:
        """Whoever asked removes the order when nothing more is wanted of it; or he is gone, and its time is up."""
        if self.current is None:
            return
        order = self._paths.order(self.current.id)
        if time.monotonic() <= self._until and order.exists():
            return
        for path in (order, self._paths.go(self.current.id)):
            with suppress(OSError):
                path.unlink()
        self.current = None

    def _refuse(self, identity: str, reason: str) -> None:
        self._answers(identity)
        with suppress(OSError):
            records.write(self._paths.refusal(identity), {"version": 1, "run": self._run.run, "reason": reason})

    def _answers(self, identity: str) -> None:
        """A place for the answers to ``identity``, instead of those to the oldest request."""
        self._answered[identity] = None
        (self._paths.answers / identity).mkdir(mode=0o755, parents=True, exist_ok=True)
        while len(self._answered) > _KEPT:
            shutil.rmtree(self._paths.answers / self._answered.popitem(last=False)[0], ignore_errors=True)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except OSError:
            try:
                path.rmdir()
            except OSError:
                if len(self._stuck) < _LOOKED_AT:
                    self._stuck.add(path.name)
