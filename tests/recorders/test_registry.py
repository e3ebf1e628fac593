"""Choosing, combining and registering recorders."""

from __future__ import annotations

from os import getpid
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from megaprof.artifacts.writer import Writer
from megaprof.autoload.install import install_hooks
from megaprof.config.options import ProfileConfig
from megaprof.config.values import known_tools
from megaprof.formats.names import raw_path
from megaprof.recorders import Window, build_recorders, register_recorder


def on(**fields: Any) -> ProfileConfig:
    return ProfileConfig(**{"target": ("train_actor",), "dir": "/t", **fields})


@pytest.fixture
def _clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaprof.config.values.registered", {})


def test_an_unknown_tool_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'ncu'; valid: one or more of nsys, memory, torch"):
        on(tool=("ncu",))
    with pytest.raises(ValueError, match="names nothing"):
        on(tool=())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool": ("torch", "nsys")}, "CUPTI serves one subscriber.*--profile-activities cpu"),
        ({"tool": ("nsys",), "record_shapes": True}, "--profile-record-shapes has no effect with --profile-tool nsys"),
        ({"tool": ("memory",), "kernels": True}, "--profile-kernels has no effect with --profile-tool memory"),
        ({"tool": ("memory",), "activities": ("cpu",)}, "--profile-activities has no effect"),
        ({"activities": ("cuda",), "with_stack": True}, "--profile-with-stack has no effect with .* cuda: add cpu"),
        ({"activities": ("cuda",), "profile_memory": True}, "--profile-memory has no effect"),
        ({"export": ("stacks",)}, "--profile-export stacks has no stacks to export: add --profile-with-stack"),
        ({"export": ("html",)}, "--profile-export: unknown value 'html'; valid: one or more of trace, stacks"),
        ({"max_host_memory": "lots"}, "--profile-max-host-memory: 'lots' is neither a size nor a share"),
    ],
)
def test_combinations_that_cannot_be_honoured_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        on(**fields)


def test_tools_that_can_coexist_are_accepted() -> None:
    assert on(tool="torch nsys", activities="cpu").tool == ("torch", "nsys")
    assert on(tool=("torch", "memory")).tool == ("torch", "memory")
    assert on(tool=("nsys",), with_stack=True, profile_memory=True).tool == ("nsys",)


@pytest.mark.parametrize("tool", ["nsys", "memory"])
def test_a_tool_that_needs_cuda_says_so_before_the_first_step(tool: str) -> None:
    with pytest.raises(ValueError, match=f"--profile-tool {tool}: there is no CUDA device here"):
        build_recorders(on(tool=(tool,)), Writer())


def test_cuda_activity_alone_needs_cuda() -> None:
    with pytest.raises(ValueError, match="--profile-activities cuda: there is no CUDA device here"):
        build_recorders(on(activities=("cuda",)), Writer())


def test_a_profiler_that_already_runs_is_refused_up_front() -> None:
    import torch

    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(ValueError, match="another torch profiler is already active"),
    ):
        build_recorders(on(), Writer())


class NoteTaker:
    """Somebody's own recorder: one text file per window."""

    def __init__(self, config: ProfileConfig, writer: Writer) -> None:
        self._directory, self._writer = Path(str(config.dir)), writer

    def start(self, window: Window) -> None:
        pass

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        final = self._directory / f"{window.target}.{window.step}.note"
        raw = raw_path(final)
        raw.write_text(metadata["schedule"])
        self._writer.submit(raw, final)

    def discard(self) -> None:
        pass


@pytest.mark.usefixtures("_clean_registry")
def test_a_registered_recorder_records_beside_ours(one_rank: Any, tmp_path: Path) -> None:
    register_recorder("notes", NoteTaker)
    assert known_tools()[-1] == "notes"
    with install_hooks(one_rank.chunks, on(dir=str(tmp_path), tool=("notes", "torch"), schedule="0")):
        one_rank.train_step()
    assert (tmp_path / "train_actor.0.note").read_text() == "no_pipelining"
    assert len(list(tmp_path.glob("*.pt.trace.json.gz"))) == 1


@pytest.mark.usefixtures("_clean_registry")
def test_a_registered_recorder_that_cannot_be_made_is_refused_by_its_option(one_rank: Any, tmp_path: Path) -> None:
    def broken(config: ProfileConfig, writer: Writer) -> NoteTaker:
        raise KeyError("ACME_HOME")

    def refuses(config: ProfileConfig, writer: Writer) -> NoteTaker:
        raise ValueError("--profile-tool refuses: no licence here")

    def scratch() -> set[Path]:
        return {each for base in (Path("/dev/shm"), Path(gettempdir())) for each in base.glob(f"*.{getpid()}.scratch")}

    register_recorder("broken", broken)
    register_recorder("refuses", refuses)
    before = scratch()  # of tests before
    for tool, said in (
        ("broken", r"--profile-tool broken: its recorder cannot be made: KeyError\('ACME_HOME'\)"),
        ("refuses", "^--profile-tool refuses: no licence here$"),
    ):
        with pytest.raises(ValueError, match=said):
            install_hooks(one_rank.chunks, on(dir=str(tmp_path), tool=(tool,)))
    one_rank.train_step()  # nothing of it is left behind
    assert scratch() <= before


@pytest.mark.usefixtures("_clean_registry")
def test_names_are_checked_and_never_taken_over() -> None:
    register_recorder("notes", NoteTaker)
    register_recorder("notes", NoteTaker)  # the same module imported twice
    for name in ("torch", "notes"):
        with pytest.raises(ValueError, match="is taken"):
            register_recorder(name, lambda config, writer: NoteTaker(config, writer))
    for name in ("", "Notes", "a b", "a,b"):
        with pytest.raises(ValueError, match="is not valid"):
            register_recorder(name, NoteTaker)


class Noting:
    """Notes what it is told; one per name."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def start(self, window: Window) -> None:
        self._said.append(f"{self._name} starts")

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        self._said.append(f"{self._name} stops")

    def discard(self) -> None:
        self._said.append(f"{self._name} discards")


@pytest.mark.usefixtures("_clean_registry")
def test_the_last_tool_to_start_is_the_first_to_stop(one_rank: Any, tmp_path: Path) -> None:
    said: list[str] = []
    for name in ("inner", "outer"):
        register_recorder(name, lambda config, writer, name=name: Noting(name, said))
    config = on(dir=str(tmp_path), tool=("outer", "inner"), schedule="0:0:1")
    with install_hooks(one_rank.chunks, config):
        one_rank.train_step()
        one_rank.train_step()
    assert said == ["outer starts", "inner starts", "inner stops", "outer stops"]
