"""Advice in the words of the host that trained."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.terminal import show
from megaprof.analysis.report.text.what_if import layout_advice
from megaprof.analysis.what_if.layouts import OVERLAP, options_of
from megaprof.autoload import HOSTS
from tests.analysis.altered import reported
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import chunk

FIRST = ("--decoder-first-pipeline-num-layers", "6")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
STAGES = ("--pipeline-model-parallel-size", "2")
LOSS = ("--account-for-loss-in-pipeline-split",)
PIECES = ("--pipeline-model-parallel-layout", "Et*5|t*3L")
LAYOUT = ("--pipeline-model-parallel-layout", "Et*3|(tt|)*2tL")
FIELD = "num_layers_in_first_pipeline_stage=6"


@pytest.mark.parametrize(
    ("framework", "role", "flags", "options"),
    [
        (
            "ms-swift",
            None,
            (*FIRST, *CHUNKS),
            "--decoder_first_pipeline_num_layers 6 --virtual_pipeline_model_parallel_size 2",
        ),
        ("ms-swift", None, LOSS, "--account_for_loss_in_pipeline_split true"),
        (
            "ms-swift",
            None,
            LAYOUT,
            "--pipeline_model_parallel_layout Et*3|(tt|)*2tL --virtual_pipeline_model_parallel_size 2",
        ),
        ("ms-swift", None, PIECES, "--pipeline_model_parallel_layout Et*5|t*3L"),
        ("megatron-bridge", None, (*FIRST, *CHUNKS), f"model.{FIELD} model.virtual_pipeline_model_parallel_size=2"),
        (
            "megatron-bridge",
            None,
            LAYOUT,
            'model.pipeline_model_parallel_layout="Et*3|(tt|)*2tL" model.virtual_pipeline_model_parallel_size=2',
        ),
        (
            "verl",
            None,
            LAYOUT,
            '++engine.override_transformer_config.pipeline_model_parallel_layout="Et*3|(tt|)*2tL" '
            "engine.virtual_pipeline_model_parallel_size=2",
        ),
        ("skyrl", "actor", LAYOUT, None),
        ("verl", None, FIRST, f"++engine.override_transformer_config.{FIELD}"),
        ("verl", "ref", FIRST, f"++actor_rollout_ref.actor.megatron.override_transformer_config.{FIELD}"),
        ("verl", "critic", CHUNKS, "critic.megatron.virtual_pipeline_model_parallel_size=2"),
        ("verl", None, LOSS, "++engine.override_transformer_config.account_for_loss_in_pipeline_split=True"),
        ("skyrl", "actor", FIRST, f"trainer.policy.megatron_config.transformer_config_kwargs.{FIELD}"),
        ("skyrl", "ref", FIRST, f"trainer.ref.megatron_config.transformer_config_kwargs.{FIELD}"),
        ("skyrl", "actor", CHUNKS, None),
        ("megatron-bridge", None, (OVERLAP,), "model.overlap_p2p_comm_warmup_flush=True"),
        ("ms-swift", None, STAGES, "--pipeline_model_parallel_size 2"),
        ("megatron-bridge", None, STAGES, "model.pipeline_model_parallel_size=2"),
        ("verl", "actor", STAGES, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"),
        ("skyrl", "actor", STAGES, "trainer.policy.megatron_config.pipeline_model_parallel_size=2"),
        ("slime", "actor", FIRST, None),
        ("megatron-lm", None, FIRST, None),
        (None, None, FIRST, None),
        ("verl", None, ("--hybrid-layer-pattern", "M-|M*"), None),
    ],
)
def test_flags_as_options_of_a_host(
    framework: str | None, role: str | None, flags: tuple[str, ...], options: str | None
) -> None:
    found = options_of(framework, role, flags, 2)
    assert (None if found is None else " ".join(found)) == options
    assert framework is None or framework in HOSTS


def test_the_report_says_them_beside_megatron_lms_flags(tmp_path: Path) -> None:
    write(Scenario("uneven", layers=(6, 2), steps=3), tmp_path)
    plain = analyze(tmp_path)
    (target,) = plain.targets
    assert target.what_if.best is not None
    flags, options = target.what_if.best.flags, options_of("verl", None, target.what_if.best.flags, 2)
    assert options
    advice = layout_advice(replace(target.what_if, host_options=options), "verl")
    report = replace(plain, targets=(replace(target, advice=advice),))
    shown = io.StringIO()
    show(report, Console(file=shown, width=200))
    assert {f"  {' '.join(flags)}", f"  verl: {' '.join(options)}"} <= set(shown.getvalue().splitlines())
    assert f"verl: {options[0]}" in page(report, {}).replace("&#34;", '"')
    assert target.what_if.host_options is None


def test_a_hybrid_model_is_laid_out_by_its_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM refuses its other layout flags beside a pattern."""
    held = (6, 2)

    def chunks(stage: int) -> list[dict[str, Any]]:
        return [chunk(held[stage], kind="MambaLayer", embedding=stage == 0, loss=stage == 1)]

    target = reported(Scenario("uneven", layers=held, steps=3), tmp_path, monkeypatch, chunks=chunks)
    assert target.what_if is not None
    assert target.what_if.best is not None
    assert target.what_if.best.flags == ("--hybrid-layer-pattern", "MMMM|MMMM")
