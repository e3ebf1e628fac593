"""Linear layers of one rank: alone, behind a norm, and one for each expert."""

import torch
import torch.nn.functional as F

from .base import TransformerEngineBaseModule
from .norms import normalised, weights


def _weight(inner, outer, init_method, dtype, parallel_mode):
    weight = torch.nn.Parameter(torch.empty(outer, inner, dtype=dtype or torch.get_default_dtype()))
    with torch.no_grad():
        (init_method or (lambda tensor: torch.nn.init.normal_(tensor, std=0.02)))(weight)
    return _marked(weight, parallel_mode)


def _bias(size, weight, parallel_mode):
    return _marked(torch.nn.Parameter(torch.zeros(size, dtype=weight.dtype)), parallel_mode)


def _marked(parameter, parallel_mode):
    parameter.tensor_model_parallel = parallel_mode in ("row", "column")
    parameter.partition_dim, parameter.partition_stride = int(parallel_mode == "row"), 1
    return parameter


class _Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        return_bias=False,
        init_method=None,
        params_dtype=None,
        tp_size=1,
        parallel_mode=None,
        **_,
    ):
        super().__init__()
        if (tp_size or 1) != 1:
            raise NotImplementedError("this stand-in for Transformer Engine knows no tensor parallelism")
        self.in_features, self.out_features, self.tp_size = in_features, out_features, 1
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.weight = _weight(in_features, out_features, init_method, params_dtype, parallel_mode)
        self.bias = _bias(out_features, self.weight, parallel_mode) if bias else None

    def projected(self, x):
        y = F.linear(x, self.weight.to(x.dtype), self.bias if self.apply_bias else None)
        return (y, self.bias) if self.return_bias else y


class Linear(_Linear):
    def forward(self, inp, is_first_microbatch=None, **_):
        return self.projected(inp)


class LayerNormLinear(_Linear):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        normalization="LayerNorm",
        zero_centered_gamma=False,
        return_layernorm_output=False,
        **options,
    ):
        super().__init__(in_features, out_features, **options)
        if return_layernorm_output:
            raise NotImplementedError("this stand-in for Transformer Engine does not return the norm's output")
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.layer_norm_weight, self.layer_norm_bias = weights(
            in_features, self.weight.dtype, normalization, zero_centered_gamma
        )

    def forward(self, inp, is_first_microbatch=None, **_):
        norm = self.layer_norm_weight, self.layer_norm_bias, self.eps, self.normalization, self.zero_centered_gamma
        return self.projected(normalised(inp, *norm))


class LayerNormMLP(TransformerEngineBaseModule):
    """A name: Megatron-Core takes a norm, two linear layers and an activation instead."""


class GroupedLinear(TransformerEngineBaseModule):
    """``num_gemms`` linear layers, each for its own part of the rows."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        bias=True,
        return_bias=False,
        init_method=None,
        params_dtype=None,
        parallel_mode=None,
        tp_size=1,
        **_,
    ):
        super().__init__()
        if (tp_size or 1) != 1:
            raise NotImplementedError("this stand-in for Transformer Engine knows no tensor parallelism")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        for number in range(num_gemms):
            weight = _weight(in_features, out_features, init_method, params_dtype, parallel_mode)
            self.register_parameter(f"weight{number}", weight)
            if bias:
                self.register_parameter(f"bias{number}", _bias(out_features, weight, parallel_mode))

    def forward(self, inp, m_splits, is_first_microbatch=None, **_):
        biases = [getattr(self, f"bias{number}") if self.use_bias else None for number in range(self.num_gemms)]
        rows = torch.split(inp, list(m_splits))
        y = torch.cat(
            [
                F.linear(part, getattr(self, f"weight{number}"), None if self.return_bias else biases[number])
                for number, part in enumerate(rows)
            ]
        )
        return (y, biases) if self.return_bias else y
