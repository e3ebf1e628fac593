"""What Megatron-Core's Mamba mixer takes of mamba_ssm for training, in plain torch: one token after the other."""

__version__ = "2.2.5"
