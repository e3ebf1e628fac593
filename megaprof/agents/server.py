"""The MCP server: its tools and documents, registered with the SDK.

Tools answer with the JSON of the commands, made by the same functions, with a headline in front. Documents are for
readers of that: pages of the documentation, a command's help, and the schema of its JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Hashable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import anyio
import msgspec
from anyio.to_thread import run_sync
from mcp.server.mcpserver import AcceptedElicitation, Context, Elicit, ElicitationResult, MCPServer, Resolve
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from megaprof.agents.excerpt import MOST, excerpt
from megaprof.analysis.report.report import Report
from megaprof.analysis.trace.reading import RECORDINGS
from megaprof.analysis.words import milliseconds, ratio, title
from megaprof.cli import COMMANDS, UsageError, in_a_line, parser_of
from megaprof.cli import status as job_status
from megaprof.cli.diff import comparison
from megaprof.cli.look import look_at
from megaprof.cli.report import report_on
from megaprof.cli.trigger import prepare
from megaprof.cli.what_if import CHOICES, answer_to, in_words
from megaprof.formats.inputs import RemotePath, files_below
from megaprof.formats.phrases import Unanswerable, counted, json_of
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
#: Pages of docs/ and what they are about. setup.py puts the same pages into the installed package.
PAGES = {
    "on-demand": "a running job: status, captures on demand",
    "options": "every option of a job, with its variable and default",
    "report": "how to read a report: words, causes, what-if; how it measures, and why a number may be missing",
    "scripts": "exit codes, JSON, and these tools: parts of answers, limits, what the user is asked before a capture",
    "timeline": "the timeline that every rank can keep",
}
_PACKAGE = Path(__file__).resolve().parents[1]
#: The documents of an installed package are in it, those of a checkout beside it.
_DOCS = _PACKAGE / "docs" if (_PACKAGE / "docs").is_dir() else _PACKAGE.parent / "docs"
#: Fields that a summary leaves out of every document: tables, and series over the steps of a run.
_TABLES = "candidates costs replay_error single stages status"
_SERIES = "buckets step_ms synchronisation_ms"
DETAILS = frozenset(f"{_TABLES} {_SERIES}".split())
#: An argument of tools only; commands have no such option.
_PART = "--part"
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ASKS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False)


def of_report(directory: Path, run: int | None = None) -> dict[str, Any]:
    """Returns the JSON of ``megaprof report DIR --json -``. Raises Unanswerable, and the errors of reading files."""
    report = _report(directory, run, _stamp(directory))
    headline = [*filter(None, [report.of_several])]
    for target in report.targets:  # as in the table that begins a report on many targets
        imbalance = "" if target.imbalance is None else f"; imbalance {ratio(target.imbalance)}"
        step = f"; a step takes {milliseconds(target.step_ms)}" if target.step_ms else ""
        headline.append(f"{title(*target.key)}: {target.in_brief().text}{imbalance}{step}")
    if report.foreign is not None:
        headline.append(report.foreign.limits)
    return {"headline": headline, **report.to_json()}


def of_change(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the JSON of ``megaprof what-if DIR --json``. Raises Unanswerable, and the errors of reading files."""
    choices = {name: getattr(given, name) for name in CHOICES}
    report = _report(given.dir, given.run, _stamp(given.dir))
    answer = answer_to(report, choices, given.target, given.role)
    return {"headline": in_words(answer), **msgspec.json.decode(json_of(answer))}


def of_status(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the JSON of ``megaprof status DIR --json``. Raises Unanswerable."""
    view = look_at(job_status.find(given.dir, given.role))
    return {
        "headline": [line for line in job_status.in_words(view) if line],
        **msgspec.to_builtins(job_status.answer(view)),
    }


@lru_cache(maxsize=2)
def _report(directory: Path, run: int | None, stamp: Hashable) -> Report:
    """Returns the report on a directory. Agents ask for the parts of one report one after the other, so it is kept, and
    read again only if its `_stamp` is another one."""
    return report_on(directory, run)


def _stamp(path: Path) -> Hashable:
    """Returns a value that changes when a file is written, or always where that cannot be seen. Raises Unanswerable."""
    try:
        if not isinstance(path, RemotePath):
            files = files_below(path, RECORDINGS) if path.is_dir() else [path]
            return frozenset((str(each), stat.st_size, stat.st_mtime_ns) for each in files if (stat := each.stat()))
    except OSError:
        pass  # reading it says what is wrong
    return object()


def page(name: str) -> str:
    return (_DOCS / f"{name}.md").read_text(encoding="utf-8")


def help_of(command: str) -> str:
    """Returns the text that ``megaprof COMMAND --help`` prints. Raises ResourceNotFoundError."""
    if command not in COMMANDS:
        raise ResourceNotFoundError(f"there is no command {command}; there are {', '.join(COMMANDS)}")
    return parser_of(command).format_help()


def schema_of(command: str) -> str:
    """Returns the JSON Schema of the output of ``megaprof COMMAND --json``. Raises ResourceNotFoundError."""
    schemas = {path.stem: path for path in sorted((_DOCS / "schemas").glob("*.json"))}
    if command not in schemas:
        raise ResourceNotFoundError(f"there is no schema {command}; there are {', '.join(schemas)}")
    return schemas[command].read_text(encoding="utf-8")


#: The tools: the arguments that each takes of its command's, what answers them, and what to know beside the command's
#: own words. No tool takes an argument that names a file to write.
_TOOLS: dict[str, tuple[str, Callable[[argparse.Namespace], Any] | None, str]] = {
    "report": (
        "dir part run",
        lambda given: of_report(given.dir, given.run),
        "Parts: targets/0/stages (every stage's times), targets/0/stages/pp=3, targets/0/what_if/candidates, "
        "targets/0/fleet/stages, ...",
    ),
    "what_if": (
        "dir layout chunks microbatches packing p2p tokens target role run part",
        of_change,
        "Everything that you do not give stays as it was captured.",
    ),
    "diff": (
        "before after part",
        lambda given: msgspec.to_builtins(comparison(given.before, given.after)),
        "It compares the prediction with the result, too. Parts: targets/0/stages, targets/0/stages/pp=3",
    ),
    "status": (
        "dir role part",
        of_status,
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
    tools: list[Tool] = []
    for name, (names, answer, text) in _TOOLS.items():
        parser = parser_of(name.replace("_", "-"))
        parser.add_argument(_PART, default="", help="a part by its path; empty: the summary")
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
    for name, description in PAGES.items():
        mcp_server.resource(f"megaprof://docs/{name}", name=name, description=description, mime_type="text/markdown")(
            partial(page, name)
        )
    mcp_server.resource("megaprof://help/{command}", description="what megaprof COMMAND --help prints")(help_of)
    mcp_server.resource(
        "megaprof://schemas/{command}",
        description="the JSON Schema of megaprof COMMAND --json: report, what-if, diff, status, trigger",
        mime_type="application/json",
    )(schema_of)
    return mcp_server


class _CommandTool(Tool):
    """A tool that takes arguments of a command, as JSON, and fails with the line of the command."""

    parser: Any = None
    taken: dict[str, Any] = Field(default_factory=dict)
    """The actions of the parser that the tool takes, by name."""

    @property
    def required(self) -> list[str]:
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
                **msgspec.json.schema(action.type if action.type in (int, float) else str),
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
        named = {name: action.option_strings[0] for name, action in self.taken.items() if action.option_strings}
        options = [f"{named[name]}={text}" for name, text in given.items() if name in named]
        places = [given[name] for name in self.taken if name not in named]  # these are all required
        namespace: argparse.Namespace = self.parser.parse([*options, "--", *places])
        return namespace


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


def _reading(answer: Callable[[argparse.Namespace], Any]) -> Callable[[Any], CallToolResult]:
    return lambda given: _text(excerpt(answer(given), given.part, DETAILS))


def ask(context: Context[Any, Any], given: Any) -> Elicit[Consent] | Consent:
    """Returns the question for the user; the consent itself if the server was started with it. Raises Unanswerable if
    the user cannot be asked, and for a wrong request."""
    if given.allowed:
        return Consent(capture=True)
    elicitation = context.client_capabilities.elicitation if context.client_capabilities else None
    if elicitation is None or (elicitation.form is None and elicitation.url is not None):
        raise Unanswerable(CANNOT_ASK)
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
        raise Unanswerable(DECLINED)
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
