"""Values per role: ``actor=0,1;ref=none``."""

from __future__ import annotations


def checked_role(name: object, option: str) -> str:
    """Returns ``name`` as the name of a role. Raises ValueError if it cannot be one."""
    if not isinstance(name, str) or not name.strip() or set(name) & set(";="):
        raise ValueError(
            f"{option}: {name!r} is not a role; valid: a non-empty name without ';' and '=', such as 'ref'"
        )
    return name.strip()


def parse_per_role(text: str, option: str) -> dict[str, str]:
    """Reads ``actor=0,1;ref=none`` as ``{"actor": "0,1", "ref": "none"}``. Raises ValueError naming ``option``."""
    values: dict[str, str] = {}
    for part in text.split(";"):
        name, equals, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or not value:
            raise ValueError(f"{option}: {part.strip()!r} in {text!r} is not 'role=...'; valid: 'actor=0,1;ref=none'")
        if name in values:
            raise ValueError(f"{option}: role {name!r} given twice in {text!r}")
        values[name] = value
    return values
