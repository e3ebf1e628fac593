"""Documents for readers of results: pages of the documentation, a command's help, and the schema of its JSON."""

from __future__ import annotations

from pathlib import Path

from mcp.server.mcpserver.exceptions import ResourceNotFoundError

from megaprof.cli import COMMANDS, parser_of

#: Pages of docs/ and what they are about. setup.py puts the same pages into the installed package.
PAGES = {
    "agents": "these tools: how to ask for parts, limits, what the user is asked before a capture",
    "exit-codes": "exit codes of the commands, and which of them print JSON",
    "on-demand": "a running job: status, captures on demand",
    "options": "every option of a job, with its variable and default",
    "report": "how to read a report: words, causes, what-if; how it measures, and why a number may be missing",
    "timeline": "the timeline that every rank can keep",
}


def page(name: str) -> str:
    """Returns the text of one of `PAGES`."""
    return (_docs() / f"{name}.md").read_text(encoding="utf-8")


def help_of(command: str) -> str:
    """Returns the text that ``megaprof COMMAND --help`` prints. Raises ResourceNotFoundError."""
    if command not in COMMANDS:
        raise ResourceNotFoundError(f"there is no command {command}; there are {', '.join(COMMANDS)}")
    return parser_of(command).format_help()


def schema_of(command: str) -> str:
    """Returns the JSON Schema of the output of ``megaprof COMMAND --json``. Raises ResourceNotFoundError."""
    schemas = {path.stem: path for path in sorted((_docs() / "schemas").glob("*.json"))}
    if command not in schemas:
        raise ResourceNotFoundError(f"there is no schema {command}; there are {', '.join(schemas)}")
    return schemas[command].read_text(encoding="utf-8")


def _docs() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed = package / "docs"
    return installed if installed.is_dir() else package.parent / "docs"
