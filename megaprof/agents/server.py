"""The MCP server: the tools and documents, registered with the SDK."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
from anyio.to_thread import run_sync
from mcp.server.mcpserver import AcceptedElicitation, Context, Elicit, ElicitationResult, MCPServer, Resolve
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError
from mcp.server.mcpserver.resources import FunctionResource
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field, ValidationError

from megaprof.agents import answers, documents
from megaprof.agents.excerpt import MOST, NoPart, excerpt
from megaprof.analysis.what_if.packing import PLANS
from megaprof.cli import CommandError, in_a_line
from megaprof.cli.jobs.trigger import prepare
from megaprof.config.windows import TARGETS
from megaprof.control.requests import SELECT, STEPS, TIMEOUT
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
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ASKS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False)

_Directory = Annotated[str, Field(description="directory of traces and timelines, a single file, or s3://...")]
_Job = Annotated[str, Field(description="the running job's --profile-dir")]
_Role = Annotated[str | None, Field(description="role, if several share the directory")]
_Part = Annotated[str, Field(description="a part by its path, such as targets/0/stages; empty: the summary")]
_Run = Annotated[int | None, Field(description="number of the run, if there are several; 1 is the oldest [newest]")]
_Capture = Annotated[str, Field(description=f"what to capture: {', '.join(TARGETS)}")]
_Steps = Annotated[int, Field(description="number of steps")]
_Select = Annotated[str, Field(description="ranks: per-stage, all, 0,8,16 or coordinates such as pp=2,tp=0")]
_Timeout = Annotated[float, Field(description="longest time for the whole call, in seconds")]
_Times = Annotated[
    list[list[float | list[float]]],
    Field(description="milliseconds by [stage][chunk]: one number, or one per microbatch"),
]


class Consent(BaseModel):
    """The form that the user of the client fills in."""

    capture: bool = Field(default=True, title="Capture", description="Capture these steps now")


def serve(*, allow_trigger: bool) -> None:
    """Serves on standard input and output until the client closes the connection. Meanwhile, the SDK redirects standard
    output to standard error, so that only the protocol is written to the client."""
    server(allow_trigger=allow_trigger).run("stdio")


def server(*, allow_trigger: bool) -> MCPServer[Any]:
    """Returns the server with all its tools and documents."""
    reading_tools: tuple[Callable[..., CallToolResult], ...] = (report, what_if, diff, simulate, status)
    tools = [
        Tool.from_function(tool, description=_description(tool), annotations=_READS, structured_output=False)
        for tool in reading_tools
    ]
    trigger_tool = trigger if allow_trigger else trigger_with_consent
    tools.append(
        Tool.from_function(
            trigger_tool, name="trigger", description=_description(trigger), annotations=_ASKS, structured_output=False
        )
    )
    mcp_server = _Server("megaprof", tools=tools, instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for name, description in documents.PAGES.items():
        uri = f"megaprof://docs/{name}"
        mcp_server.add_resource(
            FunctionResource(
                uri=uri, name=name, description=description, mime_type="text/markdown", fn=partial(documents.page, name)
            )
        )
    mcp_server.resource("megaprof://help/{command}", description="what megaprof COMMAND --help prints")(_help)
    mcp_server.resource(
        "megaprof://schemas/{command}",
        description="the JSON Schema of megaprof COMMAND --json: report, diff, status, trigger",
        mime_type="application/json",
    )(_schema)
    return mcp_server


class _Server(MCPServer[Any]):
    """A server that answers wrong arguments with one line that names the right ones. The SDK itself silently ignores
    unknown arguments, and answers a wrong value with a link to pydantic's manual."""

    def __init__(self, name: str, *, tools: list[Tool], **options: Any) -> None:
        super().__init__(name, tools=tools, **options)
        self._schemas = {tool.name: tool.parameters for tool in tools}

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None) -> Any:
        """Calls a tool. Raises ToolError, with the line, if its arguments are wrong."""
        schema = self._schemas.get(name, {"properties": arguments})
        required = schema.get("required", [])
        if unknown_names := [name for name in arguments if name not in schema["properties"]]:
            arguments_text = ", ".join(
                f"{name} (required)" if name in required else name for name in schema["properties"]
            )
            raise ToolError(
                f"megaprof {name}: there is no argument {', '.join(unknown_names)}; it takes {arguments_text}"
            )
        if missing_names := [name for name in required if name not in arguments]:
            raise ToolError(f"megaprof {name}: it needs the argument {', '.join(missing_names)}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as fault:
            if not isinstance(fault.__cause__, ValidationError):
                raise
            messages = {str(error["loc"][0]): error["msg"] for error in fault.__cause__.errors()}
            line = "; ".join(
                f"{argument}: {message[:1].lower()}{message[1:]}" for argument, message in messages.items()
            )
            raise ToolError(f"megaprof {name}: {line}") from None


def report(directory: _Directory, part: _Part = "", run: _Run = None) -> CallToolResult:
    """Report which pipeline stage is slow, why, what it costs and which layout would be faster, from traces and
    timelines: the JSON of megaprof report DIR --json. Parts: targets/0/stages (every stage's times),
    targets/0/stages/pp=3, targets/0/what_if/candidates, targets/0/fleet/stages, ..."""
    return _answered("report", partial(answers.of_report, directory, run), part, answers.DETAILS)


def what_if(
    directory: _Directory,
    layout: Annotated[str, Field(description="decoder layers of each stage, such as 5,3, or Megatron's layout")] = "",
    chunks: Annotated[int | None, Field(description="model chunks per stage")] = None,
    microbatches: Annotated[int | None, Field(description="microbatches per step")] = None,
    packing: Annotated[str, Field(description=f"how to pack the same sequences: {', '.join(PLANS)}")] = "",
    p2p_ms: Annotated[float | None, Field(description="milliseconds of one transfer between stages")] = None,
    same_tokens: Annotated[bool, Field(description="whether other microbatches share the same tokens")] = True,
    target: Annotated[str | None, Field(description=f"target: {', '.join(TARGETS)} (default: the first)")] = None,
    role: _Role = None,
    run: _Run = None,
) -> CallToolResult:
    """Predict a change of your choice from a capture: the JSON of megaprof what-if DIR --json. Everything that you do
    not give stays as it was captured."""
    values = {"layout": layout, "chunks": chunks, "microbatches": microbatches, "p2p": p2p_ms, "packing": packing}
    choices = {name: str(value) for name, value in values.items() if value is not None}
    choices["tokens"] = "same" if same_tokens else "more"
    return _answered("what-if", partial(answers.of_change, directory, run, choices, target, role), "", answers.DETAILS)


def diff(before: _Directory, after: _Directory, part: _Part = "") -> CallToolResult:
    """Compare two captures (or the JSON files of two reports) stage by stage, and the prediction with the result: the
    JSON of megaprof diff A B --json. Parts: targets/0/stages, targets/0/stages/pp=3."""
    return _answered("diff", partial(answers.of_diff, before, after), part, answers.DETAILS)


def status(directory: _Job, role: _Role = None, part: _Part = "") -> CallToolResult:
    """Show what a running job is doing, where every rank is, and which rank the others wait for if it appears to hang:
    the JSON of megaprof status DIR --json. Parts: status (every rank), status/rank=37, status/100:120, culprits."""
    return _answered("status", partial(answers.of_status, directory, role), part, answers.DETAILS)


def simulate(
    forward_ms: _Times,
    microbatches: Annotated[int, Field(ge=1, description="microbatches per step")],
    backward_ms: Annotated[_Times | None, Field(description="the same for backwards; null: forward only")] = None,
    schedule: Annotated[
        str | None,
        Field(description=f"{', '.join(SCHEDULES + SPLIT_SCHEDULES)} (default: Megatron's choice)"),
    ] = None,
    p2p_ms: Annotated[float, Field(description="milliseconds of one transfer between stages")] = 0.0,
    microbatch_group_size: Annotated[int | None, Field(description="for the interleaved schedule")] = None,
    rendezvous: Annotated[bool, Field(description="whether both ends of an exchange wait for each other")] = False,
    weight_ms: Annotated[
        _Times | None,
        Field(description=f"for {', '.join(SPLIT_SCHEDULES)}: the half of backwards that computes weight gradients"),
    ] = None,
    part: _Part = "",
) -> CallToolResult:
    """Replay one step of a pipeline schedule from plain times, in Megatron's own order: step time, and bubble and
    compute of every stage (megaprof.simulate). It needs no files. Parts: events, events/0:50."""
    document = partial(
        answers.of_simulation,
        microbatches,
        forward_ms,
        backward_ms,
        schedule=schedule,
        p2p_ms=p2p_ms,
        microbatch_group_size=microbatch_group_size,
        rendezvous=rendezvous,
        weight_ms=weight_ms,
    )
    return _answered("simulate", document, part, answers.DETAILS)


async def trigger(
    context: Context[Any, Any],
    directory: _Job,
    target: _Capture,
    role: _Role = None,
    steps: _Steps = STEPS,
    select: _Select = SELECT,
    timeout: _Timeout = TIMEOUT,
) -> CallToolResult:
    """Make a running job capture some steps, wait for the files and list them: the JSON of megaprof trigger DIR --json.
    The captured steps take longer than others, so the user is asked first, unless the server was started with
    --allow-trigger. Then read the report."""
    try:
        requester = await run_sync(
            partial(prepare, Path(directory), target, role=role, steps=steps, select=select, timeout=timeout)
        )
    except Exception as fault:
        return _failed("trigger", fault)
    looks = 0
    try:
        while (answer := await run_sync(requester.advance)) is None:
            looks += 1
            await context.report_progress(looks, message=requester.state)
            await anyio.sleep(requester.pause)
    finally:
        requester.withdraw()
    return _text(excerpt(asdict(answer)), failed=answer.reason is not None)


def ask(
    context: Context[Any, Any],
    directory: str,
    target: str,
    role: str | None,
    steps: int,
    select: str,
    timeout: float,
) -> Elicit[Consent] | CallToolResult:
    """Returns the question for the user, or the tool's answer if the user cannot be asked or the request is wrong."""
    elicitation = context.client_capabilities.elicitation if context.client_capabilities else None
    if elicitation is None or (elicitation.form is None and elicitation.url is not None):
        return _failed("trigger", CommandError(CANNOT_ASK))
    try:
        requester = prepare(Path(directory), target, role=role, steps=steps, select=select, timeout=timeout)
    except Exception as fault:
        return _failed("trigger", fault)
    steps_text = f"{counted(steps, 'step')} of {target}" + ("" if role is None else f" ({role})")
    ranks_text = f"{counted(len(requester.ranks), 'rank')} ({select})"
    return Elicit(
        f"Let the running job in {directory} capture {steps_text} on {ranks_text}? These steps take longer than "
        "others, and their files are written there.",
        Consent,
    )


async def trigger_with_consent(
    context: Context[Any, Any],
    consent: Annotated[ElicitationResult[Consent], Resolve(ask)],
    directory: _Job,
    target: _Capture,
    role: _Role = None,
    steps: _Steps = STEPS,
    select: _Select = SELECT,
    timeout: _Timeout = TIMEOUT,
) -> CallToolResult:
    """Runs `trigger` after the user of the client has agreed."""
    decision: Any = consent.data if isinstance(consent, AcceptedElicitation) else None
    if isinstance(decision, CallToolResult):
        return decision
    if decision is None or not decision.capture:
        return _failed("trigger", CommandError(DECLINED))
    return await trigger(context, directory, target, role, steps, select, timeout)


def _answered(command: str, document: Callable[[], Any], part: str, details: Collection[str]) -> CallToolResult:
    try:
        return _text(excerpt(document(), part, details))
    except NoPart as mistake:
        return _failed(command, CommandError(str(mistake)))
    except Exception as fault:
        return _failed(command, fault)


def _failed(command: str, fault: Exception) -> CallToolResult:
    """Returns the line that the command prints for a fault. A fault of megaprof itself is raised again: the SDK logs
    it, and names only the tool in its answer."""
    if (line := in_a_line(fault)) is None:
        raise fault
    return _text(f"megaprof {command}: {line}"[:MOST], failed=True)


def _text(text: str, *, failed: bool = False) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=failed)


def _description(tool: Callable[..., Any]) -> str:
    return " ".join((tool.__doc__ or "").split())


def _help(command: str) -> str:
    return _resource(documents.help_of, command)


def _schema(command: str) -> str:
    return _resource(documents.schema_of, command)


def _resource(make: Callable[[str], str], command: str) -> str:
    try:
        return make(command)
    except KeyError as unknown:
        raise ResourceNotFoundError(unknown.args[0]) from None
