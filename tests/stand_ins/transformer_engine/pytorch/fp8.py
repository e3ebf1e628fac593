"""FP8 is always off."""

import contextlib


class FP8GlobalStateManager:
    quantization_state = None

    @staticmethod
    def is_fp8_enabled():
        return False

    @staticmethod
    def is_fp8_calibration():
        return False

    @staticmethod
    def get_fp8_recipe():
        return None

    @staticmethod
    def reset():
        return None


def fp8_autocast(*_, enabled=False, **__):
    if enabled:
        raise NotImplementedError("this stand-in for Transformer Engine knows no FP8")
    return contextlib.nullcontext()


fp8_model_init = fp8_autocast
