"""What stands for an inference engine under verl: it takes the weights, and answers what tiny.answer says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from tests.trainers import tiny


class Adapter(BaseRollout):
    """In each worker: the engine's side of the weights."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Iterable[Any], wire_format: str = "named_tensors", **_: Any) -> None:
        for _weight in weights:  # gathered and renamed by every rank, as for a real engine
            pass


@ray.remote(num_cpus=0)
class Server:
    """The engine itself. Whatever else verl tells an engine to do is done at once."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()

    async def generate(self, prompt_ids: list[int], **_: Any) -> TokenOutput:
        number = self.asked[tuple(prompt_ids)]
        self.asked[tuple(prompt_ids)] += 1
        found = tiny.answer(prompt_ids, number)
        return TokenOutput(
            token_ids=found, log_probs=[-5.0] * len(found), stop_reason="completed", extra_fields={"global_steps": 0}
        )

    async def _done(self, *_: Any, **__: Any) -> None: ...

    abort_all_requests = clear_kv_cache = release_kv_cache = resume_generation = resume_kv_cache = _done
    set_global_steps = sleep = start_profile = stop_profile = wake_up = _done


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        self.servers = [Server.options(max_concurrency=self.max_concurrency).remote()]
        self._server_handle, self._server_address = self.servers[0], f"127.0.0.1:{9000 + self.replica_rank}"
