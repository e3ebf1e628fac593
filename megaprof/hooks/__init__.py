"""Hooks on megatron-core: installed in place, removed without a trace. They tell the session, and nothing else."""
