"""Arms megaprof with the ``MEGAPROF_*`` environment when it is imported, for hosts that import modules by name.

verl: ``VERL_USE_EXTERNAL_MODULES=megaprof.hosts.plugin``, or ``actor_rollout_ref.model.external_lib`` with the same
value. Under verl it is always armed, because verl's own settings may name megaprof. ms-swift: ``--external_plugins``
with the path of this file.
"""

import os
import sys

from megaprof.autoload.arming import arm

if "MEGAPROF_TARGET" in os.environ or "verl" in sys.modules:
    arm()
if "swift" in sys.modules:
    from megaprof.hosts.ms_swift import register

    register()
