"""Argument parsers that suggest the option that was probably meant, and show examples."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """The parser of one command's arguments. Its help keeps the lines of examples as they are written."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, formatter_class=_Formatter)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses all arguments. If one is unknown, prints this command's usage and the option that was probably meant,
        and exits with code 2."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            option = next((argument for argument in unknown if argument.startswith("-")), unknown[0]).partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant(option, options)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits. For a mistyped choice, adds the one that was probably meant."""
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            message += meant(match[1], [choice.strip(" '") for choice in match[2].split(",")])
        super().error(message)


def meant(typed: str, candidates: Iterable[str]) -> str:
    """Returns ``; did you mean ...?``, or an empty string if none of ``candidates`` is similar."""
    matches = difflib.get_close_matches(typed, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


class _Formatter(argparse.HelpFormatter):
    """A formatter that fills paragraphs, except for those with indented lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n\s*\n", text.strip())
        return "\n\n".join(
            paragraph if "\n  " in paragraph else super(_Formatter, self)._fill_text(paragraph, width, indent)
            for paragraph in paragraphs
        )
