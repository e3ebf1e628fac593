"""Mamba's selective scan, as its recurrence says: ``state = exp(dt A) state + dt B x`` and ``y = C state + D x``."""

import torch
import torch.nn.functional as F


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False, **_):
    """``x`` and ``z``: [batch, length, heads, size]; ``dt``: [batch, length, heads]; ``B``, ``C``: [.., groups, n]."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    heads = x.size(2) // B.size(2)
    B, C = B.repeat_interleave(heads, 2), C.repeat_interleave(heads, 2)
    state, found = x.new_zeros(*x.shape[:1], *x.shape[2:], B.size(-1)), []
    for now in range(x.size(1)):
        added = torch.einsum("bh,bhp,bhn->bhpn", dt[:, now], x[:, now], B[:, now])
        state = torch.exp(dt[:, now] * A)[..., None, None] * state + added
        found.append(torch.einsum("bhpn,bhn->bhp", state, C[:, now]))
    y = torch.stack(found, 1)
    y = y if D is None else y + x * (D if D.dim() == 2 else D[:, None])
    return (y if z is None else y * F.silu(z)).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, headdim=None, ngroups=1, activation="silu", **_
):
    """The whole mixer between its two projections; ``zxbcdt`` is [batch, length, channels]."""
    heads, headdim = dt_bias.numel(), headdim or D.size(-1)
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, conv1d_weight.size(0), heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (conv1d_weight.size(-1) - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=conv1d_weight.size(0))).transpose(1, 2)
    x, B, C = xbc.split([inner, *[(xbc.size(-1) - inner) // 2] * 2], -1)
    x, z = (each.unflatten(-1, (heads, headdim)) for each in (x, z))
    B, C = (each.unflatten(-1, (ngroups, -1)) for each in (B, C))
    return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, z, dt_bias, True).flatten(-2)
