"""slime: the function for its ``--custom-megatron-init-path``."""

from __future__ import annotations

import argparse
import os

from megaprof.autoload.arming import arm
from megaprof.integrations.slime import DEFAULTS, config_of


def init(args: argparse.Namespace) -> None:
    """Arms a training rank: slime calls it on each of them before the model is built.

    slime's ``--profile-target``, ``--profile-ranks``, ``--profile-step-start`` and ``--profile-step-end`` mean what
    they mean in slime, with windows of one step each, and so do the variables in VARIABLES. Everything else comes from
    the ``MEGAPROF_*`` environment. Without ``MEGAPROF_DIR`` in it, nothing is profiled. Raises ValueError for settings
    that cannot be honoured.
    """
    if "MEGAPROF_DIR" not in os.environ:
        return
    options = {name: getattr(args, name, default) for name, default in DEFAULTS.items()}
    settings = argparse.Namespace(
        **options, profile_dir=os.environ["MEGAPROF_DIR"], megaprof_host_defaults=DEFAULTS, profile=False
    )
    settings.use_pytorch_profiler = getattr(args, "use_pytorch_profiler", False)
    config = config_of(settings)
    if config.enabled:
        arm(config)
