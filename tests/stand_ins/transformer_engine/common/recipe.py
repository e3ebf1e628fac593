"""Recipes of low precision: names, since there is no low precision here."""

import enum


class Format(enum.Enum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("this stand-in for Transformer Engine knows no FP8")


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...


class NVFP4BlockScaling(Recipe): ...
