"""Two functions that SkyRL 0.4.0 takes from a later Megatron-Bridge than the newest release, both about experts; and
what gives weights to its inference engines."""

from types import ModuleType
from typing import Any

from tests.trainers.loading import after


def _add(utils: ModuleType) -> None:
    from megatron.core.distributed import finalize_model_grads

    later = {
        "enable_expert_parallel_grad_sync_in_finalize": lambda *_, **__: None,
        "finalize_model_grads_with_expert_adapter_sync": finalize_model_grads,
    }
    for name, function in later.items():
        if not hasattr(utils, name):
            setattr(utils, name, function)


def _send_nowhere(senders: ModuleType) -> None:
    import torch

    class Engine(senders.SkyrlTrainerCapabilities):  # type: ignore[misc, name-defined]
        def __init__(self, source: Any) -> None:
            self.source = source

        def send_weights(self) -> None:
            for _weight in self.source:  # gathered and renamed by every rank, as for a real engine
                pass

    def build(*, source_factory: Any, **_: Any) -> Engine:
        return Engine(source_factory(torch.bfloat16, "ipc"))

    senders.build_trainer_engine = build  # type: ignore[attr-defined]


after("megatron.bridge.peft.utils", _add)
after("skyrl.backends.skyrl_train.weight_sync.weight_senders", _send_nowhere)
