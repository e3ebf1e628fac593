"""Detaches CUPTI from the process behind its last window, so that the job is as quick as before.

Kineto leaves CUPTI attached when a session ends, and all that launches kernels is then slower for the rest of the run
(pytorch/pytorch#144455). A session that ends while ``TEARDOWN_CUPTI`` is 1 in the process's environment detaches it, in
the next CUDA call of the process. Kineto reads the variable anew each time.

A session that begins before that call records no kernel (pytorch/kineto#1554), and older versions of Kineto crash if
both sessions detach it (pytorch/kineto#1169). So only the last window does. The variable stays 1 until Kineto has been
prepared again, because it attaches CUPTI again only then. CUDA graphs crashed after that before CUDA 12.6
(pytorch/pytorch#151124); nobody promises that they do not any more, so processes with graphs keep CUPTI.
"""

from __future__ import annotations

import os

_TEARDOWN, _NO_RETURN = "TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"
_SINCE = 12, 6


class Cupti:
    """What is known of CUPTI in this process."""

    def __init__(self) -> None:
        self.graphs = False
        """True if a CUDA graph was captured."""
        self._set = False  # whether the variable is ours

    def prepared(self) -> None:
        """Notes that Kineto has been prepared. The session does not detach CUPTI unless `ends` says so."""
        if self._set:
            self._set = False
            os.environ.pop(_TEARDOWN, None)

    def ends(self) -> str:
        """Has the session that ends now detach CUPTI. Returns ``detached``, or why it does not."""
        for name in (_TEARDOWN, _NO_RETURN):
            if name in os.environ:
                return f"attached: {name}={os.environ[name]} is set"
        import torch

        version = tuple(map(int, str(torch.version.cuda or "0").split(".")[:2]))
        if version < _SINCE:
            return f"attached: CUDA {torch.version.cuda} is older than {'.'.join(map(str, _SINCE))}"
        if self.graphs:
            return "attached: the process has CUDA graphs"
        self._set, os.environ[_TEARDOWN] = True, "1"
        return "detached"


cupti = Cupti()
