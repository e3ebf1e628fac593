"""Arms megaprof. Python runs this at start-up wherever ``megaprof run`` put it on ``PYTHONPATH``.

It then runs the environment's own ``sitecustomize``, which it hides, as if this one were not there.
"""

import os
import sys
from importlib import import_module

_HERE = os.path.dirname(os.path.abspath(__file__))


def _arm() -> None:
    if "MEGAPROF_TARGET" not in os.environ:
        return
    try:
        try:
            import megaprof.autoload.arming
        except ModuleNotFoundError as missing:
            if missing.name != "megaprof":
                raise
            # An interpreter without megaprof among its packages, such as one that ran it from a checkout.
            sys.path.append(home := os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
            try:
                import megaprof.autoload.arming
            finally:
                sys.path.remove(home)
        megaprof.autoload.arming.arm()
        megaprof.autoload.arming.log_at_end()
    except Exception as fault:
        print(f"megaprof: cannot be loaded, profiling is off: {type(fault).__name__}: {fault}", file=sys.stderr)


def _run_the_next_one() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    our_module = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ModuleNotFoundError as missing:
        if missing.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", our_module)


_arm()
_run_the_next_one()
