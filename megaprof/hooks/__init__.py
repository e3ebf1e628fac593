"""Hooks on megatron-core, which are installed in place and removed without a trace. They report only to the session."""
