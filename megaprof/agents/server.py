"""The MCP server: the tools and documents, registered with the SDK."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, NoReturn, cast

import anyio
import msgspec
from anyio.to_thread import run_sync
from mcp.server.mcpserver import AcceptedElicitation, Context, Elicit, ElicitationResult, MCPServer, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from megaprof.agents import answers
from megaprof.agents.excerpt import MOST, excerpt
from megaprof.cli import COMMANDS, CommandError, Parser, UsageError, in_a_line, parser_of
from megaprof.cli.diff import comparison
from megaprof.cli.trigger import prepare
from megaprof.formats.phrases import counted
from megaprof.parallel.schedules import SCHEDULES, SPLIT_SCHEDULES
from megaprof.version import __version__

INSTRUCTIONS = f"""Which pipeline stage of a Megatron-Core training run is slow, why, and what to change.
The directory is the run's --profile-dir. Start with report (files) or status (a running job).
An answer is JSON of at most {MOST:,} characters, a summary first. Where something is left out, an object with its path
under "part" is in its place: call the same tool again with that part. megaprof://docs/report explains the words, and
megaprof://schemas/report the fields."""
#: The answer to an agent whose client has no way to ask the user.
CANNOT_ASK = (
    "a capture needs the consent of the user, but this client cannot ask for it (it does not support elicitation); "
    "megaprof mcp --allow-trigger captures without asking, or the user runs megaprof trigger"
)
DECLINED = "the user did not agree; no capture was requested"
_Times = list[list[float | list[float]]]
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ASKS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False)
#: The tools: the arguments that each takes of its command's, what answers them, and what to know beside the command's
#: own words. No tool takes an argument that names a file to write.
_TOOLS: dict[str, tuple[str, Callable[[argparse.Namespace], Any] | None, str]] = {
    "report": (
        "dir part run",
        lambda given: answers.of_report(given.dir, given.run),
        "Parts: targets/0/stages (every stage's times), targets/0/stages/pp=3, targets/0/what_if/candidates, "
        "targets/0/fleet/stages, ...",
    ),
    "what_if": (
        "dir layout chunks microbatches packing p2p tokens target role run part",
        answers.of_change,
        "Everything that you do not give stays as it was captured.",
    ),
    "diff": (
        "before after part",
        lambda given: msgspec.to_builtins(comparison(given.before, given.after)),
        "It compares the prediction with the result, too. Parts: targets/0/stages, targets/0/stages/pp=3",
    ),
    "simulate": (
        "forward_ms microbatches backward_ms schedule p2p_ms microbatch_group_size rendezvous weight_ms part",
        answers.of_simulation,
        "It needs no files. Parts: events, events/0:50",
    ),
    "status": (
        "dir role part",
        answers.of_status,
        "Parts: status (every rank), status/rank=37, status/100:120, culprits",
    ),
    "trigger": (
        "dir target role steps select timeout",
        None,
        "The captured steps take longer than others, so the user is asked first, unless the server was started with "
        "--allow-trigger. Then read the report.",
    ),
}


class Consent(BaseModel):
    """The form that the user of the client fills in."""

    capture: bool = Field(default=True, title="Capture", description="Capture these steps now")


def server(*, allow_trigger: bool) -> MCPServer[Any]:
    """Returns the server with all its tools and documents."""
    tools: list[Tool] = []
    for name, (names, answer, text) in _TOOLS.items():
        command = name.replace("_", "-")
        parser = parser_of(command) if command in COMMANDS else Parser(f"megaprof {command}", _SIMULATE)
        for argument, keywords in (_PART if command in COMMANDS else _SIMULATION | _PART).items():
            parser.add_argument(f"--{argument}", **keywords)
        parser.set_defaults(allowed=allow_trigger)
        parser.error = _refuse  # type: ignore[method-assign]
        made = _CommandTool.from_function(
            _reading(answer) if answer else trigger,
            name=name,
            description=f"{parser.prog}: {parser.description}. {text}",
            annotations=_READS if answer else _ASKS,
            structured_output=False,
        )
        tool = cast(_CommandTool, made)
        actions = {action.dest: action for action in parser._actions}
        tool.parser, tool.taken = parser, {name: actions[name] for name in names.split()}
        tool.parameters = tool.accepted()
        tools.append(tool)
    mcp_server: MCPServer[Any] = MCPServer(
        "megaprof", tools=tools, instructions=INSTRUCTIONS, version=__version__, log_level="WARNING"
    )
    for name, description in answers.PAGES.items():
        page = partial(answers.page, name)
        mcp_server.resource(f"megaprof://docs/{name}", name=name, description=description, mime_type="text/markdown")(
            page
        )
    mcp_server.resource("megaprof://help/{command}", description="what megaprof COMMAND --help prints")(answers.help_of)
    mcp_server.resource(
        "megaprof://schemas/{command}",
        description="the JSON Schema of megaprof COMMAND --json: report, diff, status, trigger",
        mime_type="application/json",
    )(answers.schema_of)
    return mcp_server


class _CommandTool(Tool):
    """A tool that takes arguments of a command, as JSON, and fails with the line of the command."""

    parser: Any = None
    taken: dict[str, Any] = Field(default_factory=dict)
    """The actions of the parser that the tool takes, by name."""

    @property
    def required(self) -> list[str]:
        """The names of arguments that must be given."""
        return [name for name, action in self.taken.items() if action.required]

    async def run(self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False) -> Any:
        """Answers a call. Raises a fault of megaprof itself: the SDK logs it, and names only the tool in its answer."""
        try:
            return await super().run({"given": self.given(arguments)}, context, convert_result)
        except (UsageError, ToolError) as fault:
            cause = fault.__cause__ or fault
            if not isinstance(cause, Exception) or (line := in_a_line(cause)) is None:
                raise
            return _text(f"{self.parser.prog}: {line}"[:MOST], failed=True)

    def accepted(self) -> dict[str, Any]:
        """Returns the JSON Schema of the arguments."""
        properties: dict[str, dict[str, Any]] = {}
        for name, action in self.taken.items():
            properties[name] = {
                **msgspec.json.schema(bool if action.nargs == 0 else _TYPES.get(action.type, str)),
                "description": (action.help or "") % vars(action),
            }
            if action.default is not None:
                properties[name]["default"] = action.default
        return {"type": "object", "properties": properties, "required": self.required, "additionalProperties": False}

    def given(self, arguments: dict[str, Any]) -> argparse.Namespace:
        """Returns what the command itself would be given. Raises UsageError."""
        given = {}
        for name, value in arguments.items():
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # 2.0 is an integer in JSON
            if value is not None:
                given[name] = value if isinstance(value, str) else json.dumps(value)
        if given.keys() - self.taken or set(self.required) - given.keys():
            taken = ", ".join(f"{name} (required)" if name in self.required else name for name in self.taken)
            raise UsageError(f"it takes {taken}; given: {', '.join(given) or 'nothing'}")
        options = []
        for name, text in given.items():
            for option in self.taken[name].option_strings[:1]:
                if self.taken[name].nargs != 0:
                    options.append(f"{option}={text}")
                elif text == "true":
                    options.append(option)
        places = [given[name] for name, action in self.taken.items() if not action.option_strings]
        namespace: argparse.Namespace = self.parser.parse([*options, *(["--", *places] if places else [])])
        return namespace


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


def _times(text: str) -> _Times:
    try:
        return msgspec.json.decode(text, type=_Times)
    except msgspec.MsgspecError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


#: The type of an argument in JSON, by what reads it on a command line; for all others, text.
_TYPES: dict[Any, Any] = {int: int, float: float, _times: _Times}
_PART: dict[str, dict[str, Any]] = {"part": {"default": "", "help": "a part by its path; empty: the summary"}}
#: `megaprof.simulate`, which no command runs, and its arguments.
_SIMULATE = (
    "replay one step of a pipeline schedule from plain times, in Megatron's own order, as megaprof.simulate does"
)
_SIMULATION: dict[str, dict[str, Any]] = {
    "forward_ms": {
        **{"type": _times, "required": True},
        "help": "milliseconds by [stage][chunk]: one number, or one per microbatch",
    },
    "microbatches": {"type": int, "required": True, "help": "microbatches per step"},
    "backward_ms": {"type": _times, "help": "the same for backwards (default: forward only)"},
    "schedule": {"help": f"{', '.join(SCHEDULES + SPLIT_SCHEDULES)} (default: Megatron's choice)"},
    "p2p_ms": {"type": float, "default": 0.0, "help": "milliseconds of one transfer between stages"},
    "microbatch_group_size": {"type": int, "help": "for the interleaved schedule"},
    "rendezvous": {"action": "store_true", "help": "both ends of an exchange wait for each other"},
    "weight_ms": {
        "type": _times,
        "help": f"for {', '.join(SPLIT_SCHEDULES)}: the half of backwards that computes weight gradients",
    },
}


def _reading(answer: Callable[[argparse.Namespace], Any]) -> Callable[[Any], CallToolResult]:
    return lambda given: _text(excerpt(answer(given), given.part, answers.DETAILS))


def ask(context: Context[Any, Any], given: Any) -> Elicit[Consent] | Consent:
    """Returns the question for the user; the consent itself if the server was started with it. Raises CommandError if
    the user cannot be asked, and for a wrong request."""
    if given.allowed:
        return Consent(capture=True)
    elicitation = context.client_capabilities.elicitation if context.client_capabilities else None
    if elicitation is None or (elicitation.form is None and elicitation.url is not None):
        raise CommandError(CANNOT_ASK)
    requester = prepare(given)
    role = "" if given.role is None else f" ({given.role})"
    steps_text = f"{counted(given.steps, 'step')} of {given.target}{role}"
    ranks_text = f"{counted(len(requester.ranks), 'rank')} ({given.select})"
    return Elicit(
        f"Let the running job in {given.dir} capture {steps_text} on {ranks_text}? These steps take longer than "
        "others, and their files are written there.",
        Consent,
    )


async def trigger(
    context: Context[Any, Any], consent: Annotated[ElicitationResult[Consent], Resolve(ask)], given: Any
) -> CallToolResult:
    """Captures once the user has agreed, and waits for the files."""
    if not isinstance(consent, AcceptedElicitation) or not consent.data.capture:
        raise CommandError(DECLINED)
    requester = await run_sync(partial(prepare, given))
    looks = 0
    try:
        while (answer := await run_sync(requester.advance)) is None:
            looks += 1
            await context.report_progress(looks, message=requester.state)
            await anyio.sleep(requester.pause)
    finally:
        requester.withdraw()
    return _text(excerpt(asdict(answer)), failed=answer.reason is not None)


def _text(text: str, *, failed: bool = False) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=failed)
