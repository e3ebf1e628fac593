"""Importing this arms megaprof with the ``MEGAPROF_*`` environment: for hosts that import modules they are told of.

verl: ``actor_rollout_ref.model.external_lib=megaprof.autoload.plugin``. ms-swift: ``--external_plugins FILE``, the
file being this one.
"""

import os

from megaprof.autoload import arm

if "MEGAPROF_TARGET" in os.environ:
    arm()
