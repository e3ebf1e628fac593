"""Imported in a trainer's ranks (``TRAINERS_ADAPT``): the layers of its decoder take a given time in their passes.

They wait for most of it, as a host waits for a GPU, so that a step is the same on any machine, however many stages
share its cores; they say that none do, since what waits must not be less certain for it.
"""

import os
from typing import Any

from megaprof.testing.faults import pace
from tests.trainers.loading import after

#: Milliseconds of a layer's forward and of its backward.
LAYER = (10.0, 20.0)


def _paced(module: Any) -> None:
    build = module.TransformerBlock.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        pace(self.layers, lambda: LAYER)

    module.TransformerBlock.__init__ = built


os.environ["LOCAL_WORLD_SIZE"] = "1"
after("megatron.core.transformer.transformer_block", _paced)
