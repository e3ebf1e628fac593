"""verl_engine as an inference engine by the name of ``stand_in``, in verl's own registries. verl loads this as one of
``VERL_USE_EXTERNAL_MODULES``, before it loads the registries."""

from types import ModuleType

from tests.trainers.loading import after


def _adapter(base: ModuleType) -> None:
    base._ROLLOUT_REGISTRY["stand_in", "async"] = "tests.trainers.on_ray.verl_engine.Adapter"


def _replica(replica: ModuleType) -> None:
    def load() -> type:
        from tests.trainers.on_ray import verl_engine

        return verl_engine.Replica

    replica.RolloutReplicaRegistry.register("stand_in", load)


after("verl.workers.rollout.base", _adapter)
after("verl.workers.rollout.replica", _replica)
