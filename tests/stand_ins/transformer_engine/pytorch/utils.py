"""Splitting a projection into query, key and value."""

import torch


class SplitAlongDim:
    @staticmethod
    def apply(tensor, dim, sizes):
        return torch.split(tensor, sizes, dim=dim)
