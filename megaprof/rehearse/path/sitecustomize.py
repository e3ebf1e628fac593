"""Makes this process one rank of a world that is not there. Python runs this at start-up where `rehearse` put it on
``PYTHONPATH``; it then runs the ``sitecustomize`` behind it, which arms megaprof."""

import os
import sys
from importlib import import_module

sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))]
del sys.modules["sitecustomize"]
import_module("sitecustomize")  # finds megaprof where it is, and stays
import_module("megaprof.rehearse.alone").arm()
