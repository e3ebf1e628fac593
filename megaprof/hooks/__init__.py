"""Hooks on megatron-core and on batches of trainers without it, installed in place and removed without a trace. They
report to the dispatcher."""
