"""Two functions that SkyRL 0.4.0 takes from a later Megatron-Bridge than the newest release; both are about experts."""

from types import ModuleType

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


after("megatron.bridge.peft.utils", _add)
