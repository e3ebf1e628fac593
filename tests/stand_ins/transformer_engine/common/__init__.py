"""Recipes alone."""

from . import recipe

__all__ = ["recipe"]
