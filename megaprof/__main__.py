"""``python -m megaprof`` is the command ``megaprof``."""

import sys

from megaprof.cli import main

if __name__ == "__main__":
    sys.exit(main())
