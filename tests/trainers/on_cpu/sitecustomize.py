"""On the path of a trainer's command, for its processes that train: those are on the CPU before anything else runs.

That is each rank of torchrun, and with ``TRAINERS_RAY`` each process that imports torch: Ray starts many that never do.

``TRAINERS_EDGES``: packages, comma-separated; where one is missing, tests/integrations/edges.py stands in for it.
``TRAINERS_ADAPT``: a module of the tests to import after that.
``TRAINERS_DIGESTS``: a directory for tests/trainers/digests.py.
"""

import os
import sys
from typing import Any

_on_cpu_already = False


def _patient(ray: Any) -> None:
    """Ray's node ends where one of its agents takes more than 15 seconds to say on which ports it is, too few on a busy
    machine. So the ports are chosen before; and Ray may try again, and needs no dashboard."""
    import inspect
    import socket
    from pathlib import Path

    from ray._private import services

    init, start_raylet = ray.init, services.start_raylet

    def with_ports(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(start_raylet).bind(*args, **kwargs)
        names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
        for name, each in zip(names, sockets, strict=True):
            port = given.arguments[name] = each.getsockname()[1]
            each.close()
            (Path(given.arguments["session_dir"]) / f"{name}_{given.arguments['node_id']}").write_text(str(port))
        return start_raylet(*given.args, **given.kwargs)

    def patient(*args: Any, **kwargs: Any) -> Any:
        for attempts_left in reversed(range(5)):
            try:
                return init(*args, **{"include_dashboard": False, **kwargs})
            except Exception:
                ray.shutdown()
                if not attempts_left:
                    raise

    ray.init, services.start_raylet = patient, with_ports


def _loaded(module: object) -> None:
    """torch has been loaded, or megatron-core, which may be what loads torch: then not before it is loaded itself."""
    global _on_cpu_already
    if not _on_cpu_already and (module is sys.modules.get("megatron.core") or "megatron.core" not in sys.modules):
        _on_cpu_already = True
        _on_cpu()


def _edges(_: object = None) -> list[str]:
    from tests.integrations.edges import replace_missing

    return replace_missing(*filter(None, os.environ["TRAINERS_EDGES"].split(",")))


def _on_cpu() -> None:
    from importlib import import_module

    from tests.integrations.newer import newer_typing
    from tests.trainers.cpu_process import cpu_process
    from tests.trainers.digests import write_digests

    newer_typing()
    cpu_process(gpus=2)
    if "modelopt" in _edges():
        # Without distillation Megatron-Bridge asks it for a function all the same, and takes None for none.
        import modelopt.torch.distill.plugins.megatron as distillation

        distillation.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None

    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # the wheel brings them compiled
    if os.environ.get("TRAINERS_ADAPT"):
        import_module(os.environ["TRAINERS_ADAPT"])
    if os.environ.get("TRAINERS_DIGESTS"):
        write_digests(os.environ["TRAINERS_DIGESTS"])


if "TRAINERS_EDGES" in os.environ:
    if "RANK" in os.environ:
        _on_cpu()
    elif "TRAINERS_RAY" in os.environ and not any("spawn_main" in argument for argument in sys.orig_argv):
        from tests.integrations.newer import newer_typing
        from tests.trainers.loading import after

        newer_typing()  # some modules of hosts are loaded before torch is
        after("ray", _patient)
        after("slime", _edges)  # which imports some of them before torch
        after("torch", _loaded)
        after("megatron.core", _loaded)
