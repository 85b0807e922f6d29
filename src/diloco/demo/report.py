"""`report.html`: one self-contained page with the demo's numbers and pictures."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from diloco.demo.charts import bytes_chart, loss_chart, timeline_chart
from diloco.demo.story import Outcome

STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:#1f2937;max-width:860px;margin:2.5rem auto;padding:0 1.2rem;background:#fff}
h1{font-size:1.7rem;margin-bottom:.2rem} h2{font-size:1.15rem;margin:2.2rem 0 .3rem} p{margin:.4rem 0}
.lead{color:#4b5563} .cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:.8rem;margin:1.3rem 0}
.card{border:1px solid #e5e7eb;border-radius:10px;padding:.8rem 1rem} .card b{display:block;font-size:1.55rem;line-height:1.3}
.card span{color:#6b7280;font-size:.85rem} svg{width:100%;height:auto} pre{background:#f6f8fa;border-radius:8px;padding:.9rem;
overflow-x:auto;font-size:.85rem;white-space:pre-wrap} table{border-collapse:collapse;font-size:.92rem}
td,th{border-bottom:1px solid #e5e7eb;padding:.3rem .9rem .3rem 0;text-align:left} td.n{text-align:right;font-variant-numeric:tabular-nums}
"""


def write_report(path: Path, outcome: Outcome, summary: dict[str, Any]) -> None:
    """Write the page; nothing in it is loaded from elsewhere."""
    path.write_text(_page(outcome, summary), encoding="utf-8")


def _page(outcome: Outcome, summary: dict[str, Any]) -> str:
    config, timeline = outcome.config, outcome.timeline
    sample = outcome.sample
    kills = summary["kills_survived"]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>diloco demo</title><style>{STYLE}</style></head><body>
<h1>One model, three learners, a kill</h1>
<p class="lead">A byte-level language model of {summary["num_parameters"]:,} parameters on the source text of Python's standard library.
One learner warmed up alone for {config.train.warm_start_steps} steps and initialised the run; two joined; {kills}
process{"es were" if kills != 1 else " was"} killed with <code>kill -9</code> and came back. The control is data parallel on the same
{summary["tokens"]:,} tokens with the same total batch.</p>
<div class="cards">{_cards(summary)}</div>
<h2>Loss</h2>
<p>Of the global model (never of one learner), on held-out files.</p>
{loss_chart(timeline, config)}
<h2>Bytes on the wire</h2>
<p>{_counted(summary)} Data parallel would have needed a ring all-reduce in bf16 at every step: 2·(m−1)/m·2·N bytes a learner and step,
over the steps in which m ≥ 2 learners trained. The warm start costs neither anything.</p>
{bytes_chart(summary)}
<h2>Who took part</h2>
<p>A row per learner: the band is its presence, a tick a merge that it is in, ✕ the moment the syncer gave it up, ▸ its return.
{"A dotted line is a restart of the syncer." if timeline.syncer_starts[1:] else ""}</p>
{timeline_chart(timeline)}
{_participation(summary)}
<h2>What the model writes</h2>
<pre>{html.escape(sample)}</pre>
<h2>The method</h2>
<pre>{html.escape(json.dumps(summary["method"], indent=1))}</pre>
<h2>How it was measured</h2>
<p>Syncer and learners were separate processes on this machine, joined by loopback. All losses are means over the same
{config.evaluate.sequences} held-out sequences of {config.data.sequence_length} bytes. The global model is the one the syncer served at
the end. Learning rates, H and the outer optimizer were not tuned on these sequences. It took {summary["seconds"]:.0f} s.
The same numbers are in <code>summary.json</code>.</p>
</body></html>
"""


def _cards(summary: dict[str, Any]) -> str:
    cards = [
        (f"{summary['global_loss']:.3f}", "held-out loss of the global model, nats per byte"),
        (f"{summary['baseline_loss']:.3f}", f"data parallel; the global model is {summary['loss_gap_percent']:+.1f} %"),
    ]
    if summary["isolated_loss"] is not None:
        cards.append((f"{summary['isolated_loss']:.3f}", "a learner that never communicates"))
    cards += [
        (f"{summary['bytes_ratio']:.0f}×", "fewer bytes on the wire than data parallel, joins included"),
        (
            f"{summary['kills_survived']}",
            "kill -9 survived"
            + (f", {summary['syncer_restarts']} of the syncer" if summary["syncer_restarts"] else ""),
        ),
        (f"{summary['merges']}", "merges of a fragment"),
    ]
    return "".join(f'<div class="card"><b>{number}</b><span>{text}</span></div>' for number, text in cards)


def _counted(summary: dict[str, Any]) -> str:
    if summary["counted_on"] == "sockets":
        return "Counted by the kernel on the syncer's sockets, framing and retransmissions included."
    return "This system does not count bytes per socket: these are message sizes as the learners counted them."


def _participation(summary: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{name}</td><td class="n">{100 * share:.0f} %</td><td class="n">{summary["blocked_s"].get(name, 0.0):.1f}</td></tr>'
        for name, share in summary["participation"].items()
    )
    return f"<table><tr><th>learner</th><th>in merges</th><th>seconds blocked</th></tr>{rows}</table>"
