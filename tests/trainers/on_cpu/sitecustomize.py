"""On the path of a trainer's command, for its processes that train: those are on the CPU before anything else runs.

``TRAINERS_EDGES``: packages, comma-separated; where one is missing, tests/integrations/edges.py stands in for it.
``TRAINERS_DIGESTS``: a directory; each rank writes a line there after each step of an optimizer, a digest of what that
changed. Equal lines are equal parameters, bit by bit.
"""

import os


def _digests(directory: str) -> None:
    import hashlib
    from pathlib import Path

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        with (Path(directory) / f"rank{os.environ['RANK']}").open("a") as file:
            print(digest.hexdigest(), file=file)

    register_optimizer_step_post_hook(note)


if "RANK" in os.environ and "TRAINERS_EDGES" in os.environ:
    from megaprof.testing import cpu_process
    from tests.integrations.edges import newer_typing, replace_missing

    newer_typing()
    cpu_process(gpus=2)
    if "modelopt" in replace_missing(*filter(None, os.environ["TRAINERS_EDGES"].split(","))):
        # Without distillation Megatron-Bridge asks it for a function all the same, and takes None for none.
        import modelopt.torch.distill.plugins.megatron as distillation

        distillation.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None

    import megatron.core.datasets.utils

    megatron.core.datasets.utils.compile_helpers = lambda: None  # the wheel brings them compiled
    if os.environ.get("TRAINERS_DIGESTS"):
        _digests(os.environ["TRAINERS_DIGESTS"])
