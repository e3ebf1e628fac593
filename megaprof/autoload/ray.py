"""Ray: hooks in every worker process, by Ray's own ``worker_process_setup_hook`` and the ``MEGAPROF_*`` environment.

    ray.init(runtime_env=megaprof.autoload.ray.runtime_env(config))
    ray job submit --runtime-env-json "$(megaprof run --profile-... --ray-runtime-env)" -- python train.py ...

A cluster that the training starts by itself (``ray.init()`` without an address) needs neither: its workers inherit the
environment of ``megaprof run -- python train.py ...``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megaprof.autoload.arming import arm
from megaprof.autoload.job_end import before_ray_ends, wait

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig

HOOK = "worker_process_setup_hook"


def runtime_env(config: ProfileConfig, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the runtime environment ``base``, with what makes every worker profile itself as ``config`` says.

    It also makes this process, the driver, wait for the workers' files before Ray ends them. Megaprof must be installed
    where the workers run. A relative directory is made absolute, because workers have another working directory. A
    configuration without a target adds nothing. Raises ValueError for a ``base`` that has a set-up hook already: call
    ``megaprof.autoload.ray.setup()`` in that one, and pass ``config.to_env()`` on.
    """
    merged = dict(base or {})
    if not config.enabled:
        return merged
    if HOOK in merged:
        raise ValueError(
            f"runtime_env: {HOOK} is {merged[HOOK]!r} already; call megaprof.autoload.ray.setup() in it instead, and "
            "put the MEGAPROF_ variables of ProfileConfig.to_env() into env_vars"
        )
    merged[HOOK] = f"{__name__}.{setup.__name__}"
    merged["env_vars"] = {**merged.get("env_vars", {}), **config.to_env()}
    worker = sys.modules.get("ray._private.worker")
    if worker is not None:
        before_ray_ends(worker, partial(wait, config, time.time()))
    return merged


def setup() -> None:
    """Arms a worker process: Ray calls it before the first task or actor there."""
    arm()
