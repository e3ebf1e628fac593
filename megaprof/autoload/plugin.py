"""Importing this arms megaprof with the ``MEGAPROF_*`` environment: for hosts that import modules they are told of.

verl: ``VERL_USE_EXTERNAL_MODULES=megaprof.autoload.plugin``, or ``actor_rollout_ref.model.external_lib=`` the same; its
own settings may name megaprof, too, so there it is armed in any case. ms-swift: ``--external_plugins FILE``, the file
being this one.
"""

import os
import sys

from megaprof.autoload.arming import arm

if "MEGAPROF_TARGET" in os.environ or "verl" in sys.modules:
    arm()
if "swift" in sys.modules:
    from megaprof.autoload.ms_swift import register

    register()
