"""Fused operations: names in annotations; whoever wants one is told that there is none."""


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"this stand-in for Transformer Engine has no operation {name}")

    return type(name, (), {"__init__": missing})
