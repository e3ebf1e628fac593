"""The lowest rank's part: it alone reads requests, admits one at a time, and says of each other one why not.

That is why concurrent requests need no lock: what all ranks look at is only what the gate lets through.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import suppress

from megaprof.control import directory
from megaprof.control.directory import ANSWERS, ORDERS, REQUESTS, ControlDirectory
from megaprof.control.requests import read_request
from megaprof.formats.files import Directory, Unsafe
from megaprof.formats.job.records import Absent, BadRecord
from megaprof.formats.job.requests import REQUEST_ID, Refusal, Refused, Request
from megaprof.formats.job.run import RunRecord
from megaprof.formats.names import is_shard
from megaprof.runtime.logs import logger

#: How many entries one look goes through, and how many requests it judges.
_LOOKED_AT = 4096
_JUDGED = 64
#: Answers of this many requests are kept.
_KEPT = 256
#: How long an admitted request keeps others out after nobody waits for it any more, in seconds.
_GRACE = 30.0


class Gate:
    """`current` is the request that is being carried out, None when there is none.

    Methods raise OSError where the directory does not answer, and `Unsafe` where it is not the job's alone.
    """

    def __init__(self, control: ControlDirectory, run: RunRecord) -> None:
        self._run = run
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._stuck: set[str] = set()
        self._until = 0.0
        self.current: Request | None = None
        self._open(control)

    def _open(self, control: ControlDirectory) -> None:
        """Remove what an earlier run left; nobody asks before ``run.json`` is there."""
        self._make(control)
        with control.folder(ORDERS) as orders:
            for name in orders.names(_LOOKED_AT):
                if directory.parse_request(name) is not None or directory.parse_start(name) is not None:
                    orders.unlink(name)
        with control.folder(ANSWERS) as answers:
            names = answers.names(_LOOKED_AT)
        for name in names:
            if REQUEST_ID.fullmatch(name):
                _forget(control, ANSWERS, name)

    def _make(self, control: ControlDirectory) -> None:
        for name in (ORDERS, ANSWERS):
            with control.folder(name, create=0o755):
                pass
        with control.folder(REQUESTS, create=0o700) as requests:
            if requests.stat().st_mode & 0o077:
                requests.chmod(0o700)

    def look(self, control: ControlDirectory) -> None:
        """Judge what has come in since the last time."""
        self._settle(control)
        try:
            with control.folder(REQUESTS) as requests:
                # Only what is called as a request is: what else lies there is nobody's business.
                found = {name for name in requests.names(_LOOKED_AT) if directory.parse_request(name) is not None}
                for name in sorted(found - self._stuck)[:_JUDGED]:
                    self._take(control, requests, str(directory.parse_request(name)), name)
        except FileNotFoundError:  # somebody has cleaned up
            self._make(control)

    def _take(self, control: ControlDirectory, requests: Directory, identity: str, name: str) -> None:
        try:
            self._judge(control, identity)
        except Absent:
            return
        except (Refused, BadRecord) as fault:
            reason = f"the request {fault}" if isinstance(fault, BadRecord) else str(fault)
            logger.info("megaprof: request %s is refused: %s", identity, reason)
            self._refuse(control, identity, reason)
        if not requests.unlink(name) and len(self._stuck) < _LOOKED_AT:
            self._stuck.add(name)  # a directory, for instance: judged once

    def _judge(self, control: ControlDirectory, identity: str) -> None:
        if self.current is not None and self.current.id == identity:
            return  # the same once more: it is being carried out
        record = control.read(directory.request(identity), control.owner)
        if record.get("id") != identity:
            raise Refused("the request's id is not its file's name")
        if identity in self._answered:
            raise Refused("a request of this id was answered before")
        request = read_request(record, self._run)
        if self.current is not None:
            raise Refused(f"busy with {self.current.id} ({self.current.by}), which asks for {self.current.target}")
        self._answers(control, identity)
        try:
            control.write(directory.order(identity), request.as_record(), create=True)
        except OSError as fault:
            raise Refused(f"the job's orders cannot be written: {fault.strerror}") from None
        self.current = request
        self._until = time.monotonic() + request.timeout + _GRACE
        logger.info("megaprof: request %s (%s) is carried out: %s", identity, request.by, request.target)

    def _settle(self, control: ControlDirectory) -> None:
        """Whoever asked removes the order when nothing more is wanted of it; or he is gone, and its time is up."""
        if self.current is None:
            return
        order = directory.order(self.current.id)
        if time.monotonic() <= self._until and control.exists(order):
            return
        control.unlink(order, directory.start(self.current.id))
        self.current = None

    def _refuse(self, control: ControlDirectory, identity: str, reason: str) -> None:
        self._answers(control, identity)
        with suppress(OSError):
            control.write(directory.refusal(identity), Refusal(self._run.run, reason).as_record())

    def _answers(self, control: ControlDirectory, identity: str) -> None:
        """A place for the answers to `identity`, instead of those to the oldest request."""
        self._answered[identity] = None
        with control.folder(ANSWERS, identity, create=0o755):
            pass
        while len(self._answered) > _KEPT:
            _forget(control, ANSWERS, self._answered.popitem(last=False)[0])


def _forget(control: ControlDirectory, *place: str) -> None:
    """Remove the answers to a request, or those in one shard of them: what is called as they are, and then the
    directory if it is empty."""
    with suppress(OSError, Unsafe):
        with control.folder(*place) as answers:
            for name in answers.names(_LOOKED_AT):
                if is_shard(name) and len(place) == 2:
                    _forget(control, *place, name)
                elif directory.is_answer(name):
                    answers.unlink(name)
        with control.folder(*place[:-1]) as above:
            above.rmdir(place[-1])
