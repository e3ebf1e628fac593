"""verl trains on answers in the order in which they came. Here it is that of their lengths, which all differ, so that
two runs train on the same batches."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class InOrder(ReplayBuffer):
    def _select_prompt_uids(self, *args: Any) -> tuple[Any, ...]:
        selected, found, *rest = super()._select_prompt_uids(*args)
        lengths = {key: (tag["prompt_len"], tag["response_len"]) for key, tag in found.items()}
        return selected, {key: found[key] for key in sorted(found, key=lengths.__getitem__)}, *rest
