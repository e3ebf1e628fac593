"""What hosts made for a newer Python take from its library. It imports little: each process of Ray's runs it."""

import sys
import typing


def newer_typing() -> None:
    """What they take from the ``typing`` of Python 3.12, on an older one."""
    if sys.version_info < (3, 12):
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
        typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses the older one
