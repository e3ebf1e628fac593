"""LayerNorm and RMSNorm."""

import torch
import torch.nn.functional as F


def normalised(x, weight, bias, eps, kind, zero_centered):
    scale = (weight + 1 if zero_centered else weight).to(x.dtype)
    if kind == "LayerNorm":
        return F.layer_norm(x, (x.size(-1),), scale, bias.to(x.dtype), eps)
    return F.rms_norm(x, (x.size(-1),), scale, eps)


def weights(size, dtype, kind, zero_centered):
    dtype = dtype or torch.get_default_dtype()
    weight = torch.nn.Parameter((torch.zeros if zero_centered else torch.ones)(size, dtype=dtype))
    return weight, torch.nn.Parameter(torch.zeros(size, dtype=dtype)) if kind == "LayerNorm" else None


class _Norm(torch.nn.Module):
    kind = ""

    def __init__(
        self,
        hidden_size=None,
        eps=1e-5,
        sequence_parallel=False,
        params_dtype=None,
        zero_centered_gamma=False,
        normalized_shape=None,
        **_,
    ):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        size = normalized_shape if hidden_size is None else hidden_size
        self.weight, self.bias = weights(size, params_dtype, self.kind, zero_centered_gamma)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel

    def forward(self, x):
        return normalised(x, self.weight, self.bias, self.eps, self.kind, self.zero_centered_gamma)


class LayerNorm(_Norm):
    kind = "LayerNorm"


class RMSNorm(_Norm):
    kind = "RMSNorm"
