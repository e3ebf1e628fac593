"""The whole run on all ranks, as a part of the HTML report: sentences, a curve and a table, all of it static."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from megaprof.analysis.report import words
from megaprof.analysis.report.fleet_words import parted

_WIDTH, _HEIGHT = 960, 120
_MOST = 8
_PERCENTILES = ("p50", "p95", "p99", "max")


def fleet_part(target: Mapping[str, Any]) -> str:
    """``target`` as ``TargetReport.to_json`` gives it; empty without timelines."""
    fleet = target.get("fleet")
    if not fleet:
        return ""
    fine = fleet["findings"] and fleet["findings"][0].startswith("no rank")
    lines = "".join(_finding(finding) for finding in fleet["findings"])
    first, last = fleet["steps"]
    notes = "".join(f"<p class=hint>{_text(words.sentence(note))}</p>" for note in fleet["notes"])
    return f"""<h3>The whole run: {fleet["ranks"]} ranks, steps {first}-{last}</h3>
<div class="verdict {"fine" if fine else "slow"}">{lines}</div>
{_curve(fleet)}{_table(fleet)}<div style="margin-top:8px">{notes}</div>
"""


def _finding(finding: str) -> str:
    said, command = parted(finding)
    return f"<p class=lead>{_text(said)}</p>" + (f"<p><code>{_text(command)}</code></p>" if command else "")


def _curve(fleet: Mapping[str, Any]) -> str:
    """Step time by bucket from 0 on, and the moments from which something is slow."""
    known = [ms for ms in fleet["step_ms"] if ms is not None]
    if len(known) < 2 or max(known) <= 0:
        return ""
    buckets, top = fleet["buckets"], max(known)
    span = max(buckets[-1] - buckets[0], 1)

    def x(step: int) -> str:
        return f"{(step - buckets[0]) / span * _WIDTH:.1f}"

    runs: list[list[str]] = [[]]
    for step, ms in zip(buckets, fleet["step_ms"], strict=True):
        if ms is None:
            runs.append([])
        else:
            runs[-1].append(f"{x(step)},{(1 - ms / top) * (_HEIGHT - 10) + 5:.1f}")
    lines = "".join(
        f'<polyline points="{" ".join(run)}" fill="none" style="stroke:var(--compute)" stroke-width="1.5" '
        'vector-effect="non-scaling-stroke"/>'
        for run in runs
        if run
    )
    onsets = {s["from_step"] for s in fleet["stragglers"] if not s["since_start"]}
    shifts = [shift for stage in fleet["stages"] for shift in stage["shifts"]]
    shifts += [*fleet["synchronisation_shifts"], *(shift for _, shift in fleet["stage_synchronisation"])]
    onsets |= {shift["step"] for shift in shifts if shift["after_ms"] > shift["before_ms"]}
    marks = "".join(
        f'<line x1="{x(step)}" x2="{x(step)}" y1="0" y2="{_HEIGHT}" style="stroke:var(--slow)" stroke-dasharray="4 3" '
        f'vector-effect="non-scaling-stroke"><title>from step {step} on</title></line>'
        for step in sorted(onsets)
    )
    label = f"Step time from step {fleet['steps'][0]} to {fleet['steps'][1]}, up to {words.number(top)} ms"
    listed = " and ".join(map(str, sorted(onsets)[:_MOST]))
    dashed = f"; dashed: something became slow, from step {listed} on" if onsets else ""
    return f"""<p class="hint">Step time, from 0 to {words.number(top)} ms{dashed}.</p>
<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{_text(label)}" \
style="width:100%;height:{_HEIGHT}px;display:block;border-bottom:1px solid var(--line)">{marks}{lines}</svg>
<p class="hint" style="display:flex;justify-content:space-between"><span>step {fleet["steps"][0]}</span>\
<span>step {fleet["steps"][1]}</span></p>
"""


def _table(fleet: Mapping[str, Any]) -> str:
    rows = [_row("step time", "", fleet["step"])] if fleet["step"] else []
    if known := sorted(ms for ms in fleet["synchronisation_ms"] if ms is not None):
        rows.append(_row("gradient sync", "", {"p50": known[len(known) // 2]}))
    rows += [_row(f"stage {s['pp']} compute", s["ranks"], s["compute"]) for s in fleet["stages"]]
    head = "".join(f"<th>{name}</th>" for name in ("ranks", *_PERCENTILES))
    return f"""<p class="hint">Over the run, ms per step.</p>
<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>
"""


def _row(name: str, ranks: object, times: Mapping[str, float] | None) -> str:
    cells = "".join(f"<td>{words.number(times.get(each)) if times else words.ABSENT}</td>" for each in _PERCENTILES)
    return f"<tr><td>{_text(name)}</td><td>{_text(ranks)}</td>{cells}</tr>"


def _text(content: object) -> str:
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in str(content)))
