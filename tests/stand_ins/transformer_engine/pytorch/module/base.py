"""What all modules with weights have in common."""

import torch


class TransformerEngineBaseModule(torch.nn.Module):
    def set_tensor_parallel_group(self, group):
        self.tp_group = group
