"""Fused routing of experts: Megatron-Core asks for it by ``moe_router_fusion`` only."""


def _missing(*_, **__):
    raise NotImplementedError("this stand-in for Transformer Engine has no fused router")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _missing
