"""What the command line says to people: help, examples, which option was meant."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megaprof.cli import COMMANDS, main, parser_of
from megaprof.config.arguments import config_from_args
from megaprof.formats import inputs


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n    {command}" in said for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_in_a_help_is_accepted_by_its_parser(command: str) -> None:
    module = __import__(f"megaprof.{COMMANDS[command][0]}", fromlist=["EXAMPLES"])
    parser = parser_of(command)
    assert module.EXAMPLES
    for example in module.EXAMPLES:
        assert f"\n  {example}\n" in parser.format_help() + "\n", "it stands there as it is written"
        name, first, *arguments = shlex.split(example, comments=True)
        assert (name, first) == ("megaprof", command)
        for stop in ("|", ">"):
            arguments = arguments[: arguments.index(stop)] if stop in arguments else arguments
        parsed = parser.parse(arguments)
        if command in ("run", "nsys"):
            assert config_from_args(parsed, {}).enabled


@pytest.mark.parametrize(
    ("arguments", "usage", "says"),
    [
        (["reprot", "x"], "usage: megaprof [-h]", "there is no command 'reprot'; did you mean report?"),
        (["report", "x", "--htlm", "f"], "usage: megaprof report", "--htlm f; did you mean --html?"),
        (["report", "x", "--htlm=f"], "usage: megaprof report", "did you mean --html?"),
        (["nsys", "--ray", "workers"], "usage: megaprof nsys", "did you mean worker?"),
        (["status"], "usage: megaprof status", "required: DIR"),
        (["merge", "x", "-o", "-"], "usage: megaprof merge", "'-' is not valid; valid: a path on this machine"),
        (["report", "x", "--html", "-"], "usage: megaprof report", "argument --html: '-' is not valid"),
        (["export", "x", "--parquet", "s3://a/b"], "usage: megaprof export", "'s3://a/b' is not valid"),
        (["status", "s3://a/b"], "usage: megaprof status", "argument DIR: 's3://a/b' is not valid"),
        (["ui", ""], "usage: megaprof ui", "argument DIR: '' is not valid"),
        (["--verson"], "usage: megaprof [-h]", "unrecognized arguments: --verson; did you mean --version?"),
        (["--hlep", "report", "x"], "usage: megaprof [-h]", "did you mean --help?"),
    ],
)
def test_a_mistake_is_answered_with_the_usage_of_its_command(
    arguments: list[str], usage: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(usage)
    assert says in said


@pytest.mark.parametrize("command", [["report"], ["merge", "-o", "out.json"], ["export", "--parquet", "out"]])
def test_a_hopeless_directory_stops_the_search_early(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], "/", *command[1:]]) == 1
    assert "/ is the whole file system; name the directory" in capsys.readouterr().err
    monkeypatch.setattr(inputs, "MOST_OTHERS", 20)
    for number in range(30):
        (tmp_path / f"{number}.txt").touch()
    assert main([command[0], str(tmp_path), *command[1:]]) == 1
    said = capsys.readouterr().err
    assert "holds more than 20 files" in said
    assert said.count("\n") == 1
