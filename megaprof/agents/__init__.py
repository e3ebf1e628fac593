"""``megaprof mcp``: a server of the Model Context Protocol, for the agent that starts it."""

from __future__ import annotations

import argparse
import sys

EXAMPLES = (
    "megaprof mcp",
    "megaprof mcp --allow-trigger   # captures start without asking",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "An MCP client starts this command and talks to it on its standard input and output; docs/scripts.md says how "
        "to add it to a client. Its tools are report, what_if, diff, status and trigger. It opens no port "
        "and writes no file; trigger makes a running job write its captures."
    )
    parser.add_argument(
        "--allow-trigger",
        action="store_true",
        help="let the agent capture without asking. Otherwise the client must ask its user, or the request is refused",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until the client closes the connection."""
    from megaprof.agents.server import server

    if sys.stdin.isatty():
        print("megaprof mcp: waiting for an MCP client on standard input (Ctrl-D to exit)", file=sys.stderr)
    # The SDK redirects standard output to standard error, so that the client reads nothing but the protocol.
    server(allow_trigger=arguments.allow_trigger).run("stdio")
    return 0
