"""`megaprof mcp`, as the SDK's own client speaks with it: in memory, and with a process over its standard input and
output."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, ElicitResult, TextContent
from msgspec.structs import replace

from megaprof.agents.excerpt import MOST, excerpt
from megaprof.agents.server import CANNOT_ASK, DECLINED, DETAILS, PAGES, of_report, server
from megaprof.cli import FAILED, main
from megaprof.cli import status as job_status
from megaprof.cli.look import View, look_at
from megaprof.cli.report import report_on
from megaprof.control.blame import find_culprits
from megaprof.control.directory import RunningJob
from megaprof.control.request import STEPS
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import pipeline
from tests.cli.running import ROOT, check
from tests.cli.test_status import Job
from tests.control import places
from tests.control.control_jobs import running

Talk = Callable[[Client], Awaitable[Any]]
TOOLS = {"report", "what_if", "diff", "status", "trigger"}


def talk(log: Path, conversation: Talk, *options: str, **client: Any) -> Any:
    """What a conversation with a server of its own comes to; the server's standard error goes to ``log``."""

    async def run() -> Any:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        line = StdioServerParameters(
            command=sys.executable, args=["-m", "megaprof", "mcp", *options], env={"PYTHONPATH": path}
        )
        with open(log, "w") as errors:
            async with Client(stdio_client(line, errlog=errors), read_timeout_seconds=120, **client) as connected:
                return await conversation(connected)

    return asyncio.run(run())


def ask(conversation: Talk, *, allow_trigger: bool = False, **client: Any) -> Any:
    """What a conversation with a server in this process comes to."""

    async def run() -> Any:
        async with Client(server(allow_trigger=allow_trigger), read_timeout_seconds=120, **client) as connected:
            return await conversation(connected)

    return asyncio.run(run())


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    """A tool's answer as data."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text(result)
    return json.loads(text(result))


def text(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    assert len(content.text) <= MOST
    return content.text


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([*map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_tools_give_the_json_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, run = (str(tmp_path / name) for name in ("before", "after", "run"))
    pipeline(Path(before), [6, 2])
    pipeline(Path(after), [4, 4])
    layout = WorldLayout(ParallelSizes(pp=2, dp=2))
    write_timelines(Path(run), layout, steps=60, slow=[Slow(rank=1, from_step=20, factor=2.0)])
    reports = {each: printed(capsys, "report", each, "--json", "-") for each in (before, run)}
    difference = printed(capsys, "diff", before, after, "--json")
    change = printed(capsys, "what-if", before, "--layout", "4,4", "--microbatches", "8", "--json")

    async def conversation(client: Client) -> None:
        listed = (await client.list_tools()).tools
        assert {tool.name for tool in listed} == TOOLS
        assert {tool.name for tool in listed if tool.annotations and tool.annotations.read_only_hint} == TOOLS - {
            "trigger"
        }
        assert all(tool.description for tool in listed)
        schemas = {tool.name: tool.input_schema for tool in listed}
        assert schemas["report"]["required"] == ["dir"]
        assert schemas["report"]["properties"].keys() == {"dir", "part", "run"}
        assert schemas["trigger"]["properties"]["steps"] == {
            **{"type": "integer", "default": STEPS},
            "description": f"number of steps (default: {STEPS})",
        }

        summary = await call(client, "report", dir=before)
        assert summary["headline"][0].startswith("train_actor: layers of stage 0 (")
        (target,), (whole,) = summary["targets"], reports[before]["targets"]
        for name in ("diagnosis", "findings", "slowest_stage", "imbalance", "step_time_ms", "sizes", "warnings"):
            assert target[name] == whole[name]
        assert target["what_if"]["best"] == whole["what_if"]["best"]
        assert target["stages"]["part"] == "targets/0/stages"
        assert await call(client, "report", dir=before, part="targets/0/stages") == whole["stages"]
        assert await call(client, "report", dir=before, part="targets/0/stages/pp=1") == whole["stages"][1]
        assert await call(client, "report", dir=before, part="targets") == reports[before]["targets"]

        (target,), (whole,) = (await call(client, "report", dir=run))["targets"], reports[run]["targets"]
        assert "slow rank 1 (" in (await call(client, "report", dir=run, part="headline"))[0]
        assert target["findings"] == whole["findings"]
        assert target["fleet"]["times"]["step_ms"]["items"] == len(whole["fleet"]["times"]["step_ms"]) == 60
        asked = await call(client, "report", dir=run, part="targets/0/fleet/stages")
        assert asked == whole["fleet"]["stages"]

        layouts = await call(client, "report", dir=before, part="targets/0/what_if/candidates")
        assert layouts == reports[before]["targets"][0]["what_if"]["candidates"]

        changed = await call(client, "what_if", dir=before, layout="4,4", microbatches=8.0)
        assert changed["prediction"] == change["prediction"]

        compared = await call(client, "diff", before=before, after=after)
        assert compared["targets"][0]["prediction"] == difference["targets"][0]["prediction"]
        assert (
            await call(client, "diff", before=before, after=after, part="targets/0/stages")
            == (difference["targets"][0]["stages"])
        )

    ask(conversation)


def test_a_report_is_read_again_when_a_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []

    def counted(*given: Any) -> Any:
        reads.append(given)
        return report_on(*given)

    monkeypatch.setattr("megaprof.agents.server.report_on", counted)
    pipeline(tmp_path, [6, 2])
    for _ in range(2):
        assert len(of_report(tmp_path)["targets"]) == 1
    assert len(reads) == 1
    pipeline(tmp_path, [4, 4], target="train_log_probs")
    assert len(of_report(tmp_path)["targets"]) == 2
    assert len(reads) == 2


# -- a running job ----------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "job").mkdir()
    job = Job(tmp_path / "job")
    job.begin()
    for rank in (0, 1):
        job.status(rank)
    return job


def answering(job: Job, *, last: str = "done") -> AbstractContextManager[None]:
    return places.answering(job.paths, job.run, job.layout, (0, 1), last=last)


def requests(job: Job) -> list[Path]:
    return list(job.paths.root.glob("capture.json"))


def test_status_of_a_job_and_of_one_of_its_ranks(job: Job) -> None:
    async def conversation(client: Client) -> None:
        summary = await call(client, "status", dir=str(job.directory))
        first, second = summary["headline"]
        assert first.startswith("2 ranks (pp=2), running for ")
        assert second == "train_actor: step 4, one every 200 ms (medians)"
        assert (summary["state"], summary["heard"]) == ("runs", [0, 1])
        assert summary["status"]["part"] == "status"
        assert (await call(client, "status", dir=str(job.directory), part="status/rank=1"))["rank"] == 1
        del summary["headline"]
        for part in ("status", "now"):  # the summary leaves tables out
            summary[part] = await call(client, "status", dir=str(job.directory), part=part)
        check("status", summary)

    ask(conversation)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_capture_is_made_when_the_user_agrees(mode: str, job: Job) -> None:
    asked = []

    async def agree(context: object, question: Any) -> ElicitResult:
        asked.append((question.message, requests(job)))
        return ElicitResult(action="accept", content={"capture": True})

    async def conversation(client: Client) -> Any:
        return await call(client, "trigger", dir=str(job.directory), target="train_actor", timeout=60)

    with answering(job):
        found = ask(conversation, mode=mode, elicitation_callback=agree)
    check("trigger", found)
    assert (found["selected"], found["captured"], found["steps"], found["reason"]) == ([0, 1], 2, [5, 6], None)
    assert found["files"] == [str(job.directory / name) for name in ("0.gz", "1.gz")]
    ((question, before),) = asked
    assert f"job in {job.directory} capture 2 steps of train_actor on 2 ranks (per-stage)?" in question
    assert before == [], "nothing was asked of the job before"


@pytest.mark.parametrize(
    ("mode", "answer", "says"),
    [
        ("auto", ElicitResult(action="decline"), DECLINED),
        ("legacy", ElicitResult(action="cancel"), DECLINED),
        ("auto", ElicitResult(action="accept", content={"capture": False}), DECLINED),
        ("auto", None, CANNOT_ASK),
        ("legacy", None, CANNOT_ASK),
    ],
)
def test_without_consent_nothing_is_asked_of_the_job(
    mode: str, answer: ElicitResult | None, says: str, job: Job
) -> None:
    async def reply(context: object, question: object) -> ElicitResult:
        assert answer is not None
        return answer

    async def conversation(client: Client) -> CallToolResult:
        return await client.call_tool("trigger", {"dir": str(job.directory), "target": "train_actor"})

    result = ask(conversation, mode=mode, **({} if answer is None else {"elicitation_callback": reply}))
    assert (result.is_error, text(result)) == (True, f"megaprof trigger: {says}")
    assert requests(job) == []


def test_a_server_that_may_capture_asks_nobody_and_says_what_is_missing(job: Job) -> None:
    async def conversation(client: Client) -> CallToolResult:
        arguments = {"dir": str(job.directory), "target": "train_actor", "timeout": 60}
        return await client.call_tool("trigger", arguments)

    with answering(job, last="failed"):
        result = ask(conversation, allow_trigger=True)
    found = json.loads(text(result))
    check("trigger", found)
    assert result.is_error, "only part of the work was done"
    assert (found["captured"], found["reason"]) == (1, "rank 1: too late")


def test_a_request_is_withdrawn_when_the_client_hangs_up(job: Job, tmp_path: Path) -> None:
    async def conversation(client: Client) -> None:
        for rank in (0, 1):
            job.status(rank)  # however long the server took to begin
        arguments = {"dir": str(job.directory), "target": "train_actor"}
        calling = asyncio.create_task(client.call_tool("trigger", arguments))
        until = time.monotonic() + 60
        while not requests(job):
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        calling.cancel()

    talk(tmp_path / "log", conversation, "--allow-trigger")
    assert requests(job) == []


# -- what goes wrong --------------------------------------------------------------------------------------------------


#: A tool, its arguments, and the command that fails alike; None where only the tool can be asked so.
FAULTS: list[tuple[str, dict[str, Any], list[str] | None]] = [
    ("report", {"dir": "nowhere"}, ["report", "nowhere"]),
    ("report", {"dir": "empty"}, ["report", "empty"]),
    ("report", {"dir": "/"}, ["report", "/"]),
    ("report", {"dir": "--html=page.html"}, ["report", "--", "--html=page.html"]),
    ("report", {"dir": "traces", "part": "stages"}, None),
    ("diff", {"before": "traces", "after": "empty"}, ["diff", "traces", "empty"]),
    ("diff", {"before": "traces", "after": "other"}, ["diff", "traces", "other"]),
    ("diff", {"before": "traces", "after": "text.txt"}, ["diff", "traces", "text.txt"]),
    ("status", {"dir": "nowhere"}, ["status", "nowhere"]),
    ("trigger", {"dir": "nowhere", "target": "x"}, ["trigger", "nowhere", "--target", "x"]),
    ("trigger", {"dir": "job", "target": "x"}, ["trigger", "job", "--target", "x"]),
    ("trigger", {"dir": "job", "target": "evaluate", "steps": 0}, ["trigger", "job", "--target", "evaluate"]),
    ("report", {"place": "traces"}, None),
    ("report", {"dir": "traces", "run": "x"}, None),
]


@pytest.mark.parametrize(
    ("tool", "arguments", "names"),
    [
        ("report", {"place": "traces"}, ["place", "dir (required)", "part"]),
        ("report", {"dir": "traces", "role": "actor"}, ["role", "dir (required)"]),
        ("report", {"dir": "traces", "html": "page.html"}, ["html", "dir (required)"]),
        ("trigger", {"dir": "job", "target": "train_actor", "allowed": True}, ["allowed", "target (required)"]),
        ("trigger", {"given": {"allowed": True}}, ["given", "target (required)"]),
        ("diff", {"before": "a"}, ["after"]),
        ("trigger", {"dir": "job", "what": "x"}, ["what", "target (required)"]),
    ],
)
def test_a_wrong_argument_is_answered_with_the_right_ones(
    tool: str, arguments: dict[str, Any], names: list[str]
) -> None:
    async def conversation() -> CallToolResult:
        async with Client(server(allow_trigger=False)) as client:
            return await client.call_tool(tool, arguments)

    result = asyncio.run(conversation())
    said = text(result)
    assert (result.is_error, said.count("\n")) == (True, 0)
    assert all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said) for name in names), said


def test_a_fault_is_the_line_that_the_command_prints(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    pipeline(place / "traces", [6, 2])
    pipeline(place / "other", [6, 2], target="train_log_probs")
    (place / "empty").mkdir()
    (place / "job").symlink_to(job.directory)
    (place / "text.txt").write_text("no report")
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}

    async def conversation(client: Client) -> list[CallToolResult]:
        return [await client.call_tool(tool, arguments) for tool, arguments, _ in FAULTS]

    results = ask(conversation, allow_trigger=True)
    for (tool, arguments, line), result in zip(FAULTS, results, strict=True):
        assert result.is_error, tool
        said = text(result)
        assert len(said.splitlines()) == 1
        if line is None:
            assert said.startswith(f"megaprof {tool}: ")
            continue
        steps = ["--steps", str(arguments["steps"])] if "steps" in arguments else []
        assert main([*line, *steps]) != 0
        printed = capsys.readouterr().err.splitlines()[-1]
        assert re.sub(r"\d+ s ago", "some time ago", printed) == re.sub(r"\d+ s ago", "some time ago", said)
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
    assert requests(job) == []


def test_a_fault_of_ours_tells_the_agent_nothing_but_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("megaprof.agents.server.report_on", broken)

    async def conversation(client: Client) -> CallToolResult:
        return await client.call_tool("report", {"dir": str(tmp_path)})

    result = ask(conversation)
    assert (result.is_error, text(result)) == (True, "Error executing tool report")


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        ("None", "megaprof mcp: needs mcp: pip install 'megaprof[mcp]'\n"),
        (  # as of nvidia-resiliency-ext, which wants a version below 2
            "types.ModuleType('mcp')",
            "megaprof mcp: needs a later mcp: pip install 'megaprof[mcp]', in another environment if something in this "
            "one needs the version that it has\n",
        ),
    ],
)
def test_without_the_extra_one_line_names_it(installed: str, line: str, tmp_path: Path) -> None:
    old = f"import sys, types\nsys.modules['mcp'] = old = {installed}\nif old: old.__path__ = []\n"
    (tmp_path / "sitecustomize.py").write_text(old)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    for arguments, code, says in (
        ([], FAILED, line),
        (["--help"], 0, ""),
    ):
        command = [sys.executable, "-m", "megaprof", "mcp", *arguments]
        ran = subprocess.run(
            command, env=environment, input="", capture_output=True, text=True, timeout=60, check=False
        )
        assert (ran.returncode, ran.stderr) == (code, says)


def test_nothing_but_the_protocol_is_written_to_standard_output(tmp_path: Path) -> None:
    """A report that starts processes of its own, and a server that ends when its input does."""
    pipeline(tmp_path / "traces", [6, 2])
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "0"}}
    report = {"name": "report", "arguments": {"dir": str(tmp_path / "traces")}}
    sent = [
        {"id": 1, "method": "initialize", "params": about},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": report},
    ]
    line = [sys.executable, "-m", "megaprof", "mcp"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for each in sent:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **each}) + "\n")
            process.stdin.flush()
        received = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdin.close()
        rest = process.stdout.read()
        assert process.wait(60) == 0
    assert [each["id"] for each in received] == [1, 2]
    assert "layers of stage 0" in received[1]["result"]["content"][0]["text"]
    assert rest == ""


# -- documents --------------------------------------------------------------------------------------------------------


def test_documents_help_and_schemas_can_be_read() -> None:
    async def conversation(client: Client) -> None:
        async def read(uri: str) -> str:
            (content,) = (await client.read_resource(uri)).contents
            found: str = content.text  # type: ignore[union-attr]
            return found

        listed = {str(each.uri) for each in (await client.list_resources()).resources}
        assert listed == {f"megaprof://docs/{name}" for name in PAGES}
        for name in PAGES:
            assert await read(f"megaprof://docs/{name}") == (ROOT / "docs" / f"{name}.md").read_text()
        assert "--allow-trigger" in await read("megaprof://help/mcp")
        for name in ("report", "diff", "status", "trigger"):
            schema = json.loads(await read(f"megaprof://schemas/{name}"))
            assert schema == json.loads((ROOT / "docs" / "schemas" / f"{name}.json").read_text())
        for unknown in ("help/rm", "schemas/x", "docs/../setup.cfg"):
            with pytest.raises(MCPError):
                await read(f"megaprof://{unknown}")

    ask(conversation)


# -- how large an answer may be ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_report_on_64_stages_fits_and_says_what_is_slow(tmp_path: Path) -> None:
    write(Scenario("many stages", layers=(2,) * 40 + (4,) + (2,) * 23, microbatches=16, gpu=False), tmp_path)
    found = excerpt(of_report(tmp_path), details=DETAILS)
    assert len(found) <= MOST
    summary = json.loads(found)
    (target,) = summary["targets"]
    assert (target["slowest_stage"], target["stages"]["items"]) == (40, 64)
    assert "layers of stage 40" in summary["headline"][0]
    assert ("layers", 40) in [(cause["kind"], cause["stage"]) for cause in target["diagnosis"]["causes"]]


@pytest.mark.slow
def test_the_status_of_16384_ranks_fits_and_each_rank_can_be_asked_for(job: Job) -> None:
    layout = WorldLayout(ParallelSizes(tp=8, pp=16, dp=128))
    one = look_at(job_status.find(job.directory)).statuses[0]
    run = replace(job.run, sizes=layout.sizes)
    now = time.time()
    statuses = {rank: replace(one, rank=rank, since=now, time=now) for rank in range(16384)}
    running_job = RunningJob(job.directory, run)
    blame = find_culprits(run, statuses, now, 60.0)
    view = View(running_job, statuses, now, blame, None)
    document = {"headline": job_status.in_words(view), **msgspec.to_builtins(job_status.answer(view))}
    shown = excerpt(document, details=DETAILS)
    assert len(shown) <= MOST
    found = json.loads(shown)
    assert (found["ranks"], found["heard"]["items"], found["status"]["items"]) == (16384, 16384, 16384)
    assert found["headline"][0].startswith("16384 ranks")
    assert json.loads(excerpt(document, "status/rank=37"))["rank"] == 37


@pytest.mark.slow  # 2,048 timelines
def test_a_report_on_thousands_of_ranks_fits_and_names_the_slow_one(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(tp=8, pp=16, dp=16))
    write_timelines(tmp_path, layout, steps=40, slow=[Slow(rank=1700, factor=1.6)])
    found = excerpt(of_report(tmp_path), details=DETAILS)
    assert len(found) <= MOST
    (target,) = json.loads(found)["targets"]
    assert target["fleet"]["coverage"]["ranks"] == 2048
    # It and those that wait for it in a microbatch.
    assert ("slow_rank", list(range(1696, 1704))) in [
        (cause["kind"], cause["ranks"]) for cause in target["diagnosis"]["causes"]
    ]


# -- a real job -------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # two real ranks that train
def test_an_agent_looks_at_a_real_job_captures_and_reports(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    asked = []
    captured: dict[str, Any] = {}

    async def agree(context: object, question: Any) -> ElicitResult:
        asked.append(question.message)
        return ElicitResult(action="accept", content={"capture": True})

    async def capture(client: Client) -> None:
        now = await call(client, "status", dir=str(directory))
        assert now["state"] in ("starts", "runs")
        captured.update(await call(client, "trigger", dir=str(directory), target="train_actor", steps=2))
        assert (captured["captured"], len(captured["steps"]), captured["reason"]) == (2, 2, None)
        assert all(Path(file).is_file() for file in captured["files"])

    async def read(client: Client) -> None:
        report = await call(client, "report", dir=str(directory))
        (target,) = report["targets"]
        # Lengths are those of the steps without a profiler.
        assert target["steps"]
        assert not set(target["steps"]) & set(captured["steps"])
        assert target["profiled_step_time_ms"] is not None
        stages = await call(client, "report", dir=str(directory), part="targets/0/stages")
        assert [stage["pp"] for stage in stages] == [0, 1]

    with running(directory, ["--profile-tool", "timeline", "--profile-on-demand"], quick=True):
        talk(tmp_path / "log", capture, elicitation_callback=agree)
    talk(tmp_path / "log", read)  # of a job that still runs, each call would see more steps
    assert len(asked) == 1
