"""Everything of megaprof that needs a GPU, in one command: ``python -m tests.gpu``; see docs/gpu.md."""
