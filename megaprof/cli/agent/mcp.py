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
        "An MCP client starts this command itself and speaks with it on its standard input and output; docs/agents.md "
        "says how to add it to one. Its tools are report, what_if, diff, simulate, status and trigger. It opens no "
        "port and writes no file; trigger makes a running job write its captures."
    )
    parser.add_argument(
        "--allow-trigger",
        action="store_true",
        help="let the agent capture without asking; else the client asks its user, and a client that cannot is refused",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until the client hangs up."""
    from megaprof.cli.agent.server import serve

    if sys.stdin.isatty():
        print("megaprof mcp: waits for an MCP client on standard input, not for you (Ctrl-D ends)", file=sys.stderr)
    serve(allow_trigger=arguments.allow_trigger)
    return 0
