"""Ranks that begin at once: forks of a process that has imported torch and megatron-core already.

Most tests need two ranks for a second or two, and each of them would import for several seconds first. `Server.start`
stands in for `megaprof.testing.launcher.start`, and gives a fresh interpreter all the same where something is set that
is read when one begins. The fixture ``fresh_ranks`` is for tests that need fresh ones throughout.

This file is also the program of that process (`_serve`). It has one thread and no CUDA, so a fork of it is whole.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping
from typing import Any

#: What an interpreter, its loader or a library reads once, when it begins.
_READ_ONCE = ("PYTHON", "LD_", "OMP_", "MKL_", "KINETO_", "TORCH", "NVTX_", "TRANSFORMERS", "VIRTUAL_ENV")
#: What a fork can do itself.
_WARNINGS = "PYTHONWARNINGS"
_MODULES = (
    "torch.distributed",
    "torch.profiler",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
)
#: A request is the code and the environment: Linux allows a packet of 208 KiB unless told otherwise.
_PACKET = 200_000


class Forked:
    """As much of `subprocess.Popen` as the launcher uses, of a process that is the server's child."""

    def __init__(self, pid: int, status: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = os.fdopen(stdout, errors="replace")
        self.stderr = os.fdopen(stderr, errors="replace")
        self._status = status
        # A watch asks on a thread of its own. Closed twice, the descriptor may be one of another process's by then.
        self._asking = threading.Lock()

    def poll(self) -> int | None:
        with self._asking:
            if self.returncode is None:
                with contextlib.suppress(BlockingIOError):
                    told = os.read(self._status, 16)
                    # Nothing told: the server is gone, and its children with it (see `_rank_main`).
                    self.returncode = int(told) if told else -signal.SIGKILL
                    os.close(self._status)
        return self.returncode

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Server:
    """Begins with the first rank, and ends with the ``with``.

    ``fresh``: `megaprof.testing.launcher.start`, for ranks that may not be forks.
    """

    def __init__(self, fresh: Any) -> None:
        self._fresh = fresh
        # The last is what each rank has of the launcher.
        ranks = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        self._environment, self._path = {**os.environ, **ranks}, list(sys.path)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait()

    def start(self, code: str, env: Mapping[str, str]) -> Any:
        """A process that runs ``code`` with ``env`` as its whole environment."""
        if not self.fits(env):
            return self._fresh(code, env)
        request = json.dumps({"code": code, "env": dict(env)}).encode()
        out, err, told = os.pipe(), os.pipe(), os.pipe()
        os.set_blocking(told[0], False)
        theirs = [out[1], err[1], told[1]]
        try:
            with self._lock:
                if self._process is None:
                    self._begin()
                socket.send_fds(self._socket, [request], theirs)
                pid = int(self._socket.recv(32))
        finally:
            for each in theirs:
                os.close(each)
        return Forked(pid, told[0], out[0], err[0])

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether a fork would be like a fresh interpreter with ``env``."""
        return sys.path == self._path and _read_once(env) == _read_once(self._environment)

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the tests, and they end it
            )


def _read_once(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_ONCE) and name != _WARNINGS}


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for every request until the tests end (None). In a child: its request."""
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    running: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                selector.unregister(key.fd)
                pid, told = running.pop(key.fd)
                os.write(told, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(told)
                os.close(key.fd)
                continue
            request, streams, _, _ = socket.recv_fds(connection, _PACKET, 3)
            if not request:
                return None
            pid = os.fork()
            if not pid:
                selector.close()
                connection.close()
                for descriptor, (_, told) in running.items():
                    os.close(descriptor)
                    os.close(told)
                os.dup2(streams[0], 1)
                os.dup2(streams[1], 2)
                for each in streams:
                    os.close(each)
                return json.loads(request)  # type: ignore[no-any-return]
            connection.send(str(pid).encode())
            os.close(streams[0])
            os.close(streams[1])
            descriptor = os.pidfd_open(pid)
            selector.register(descriptor, selectors.EVENT_READ)
            running[descriptor] = (pid, streams[2])


def _main(descriptor: int) -> None:
    gc.disable()  # what is imported stays
    show, warnings.showwarning = warnings.showwarning, lambda *_, **__: None  # in the output of the first test
    for name in _MODULES:
        importlib.import_module(name)
    warnings.showwarning = show
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, everything that it shares
    request = _serve(socket.socket(fileno=descriptor))
    if request is None:
        return
    gc.enable()
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    warnings._processoptions(filter(None, os.environ.get(_WARNINGS, "").split(",")))  # type: ignore[attr-defined]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(request["code"], main.__dict__)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
