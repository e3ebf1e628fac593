"""Frameworks for reinforcement learning and fine-tuning: one file with everything about each (`autoload.contract`)."""
