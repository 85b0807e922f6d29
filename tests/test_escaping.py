"""What another machine said never breaks, or rules, a terminal, a log or a page."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from tests.syncer.runs import RUN, Raw, method, start
from typer.testing import CliRunner

from diloco import errors, events
from diloco.cli.status import command
from diloco.escaping import PlainFormatter, printable
from diloco.event_log import EventLog
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import ERROR_KEY, MAX_TEXT, from_rpc_error
from diloco.report.page import numbers, read_run, rows, summary, write_page

HOSTILE = (
    "[/x]",
    "[bold red]x[/]",
    "\x1b[2J\x1b]0;title\x07",
    "a\nb",
    "a\u202eb",
    "<script>alert(1)</script>",
    r"$\foo$",
    "",
)
"""Names that a syncer or a file of events may hold, which no syncer of this version lets in."""


def test_printable_keeps_what_is_and_escapes_the_rest() -> None:
    assert printable("site-a é 模型") == "site-a é 模型"
    assert printable("a\x1b[2J\n\u202e\ud800") == r"a\x1b[2J\n\u202e\ud800"
    assert printable("x" * 10, most=4) == "xxxx..."


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("reason", ["waiting", "[/y]\x1b[31m"])
def test_a_hostile_syncer_never_breaks_the_status(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address, "raw")
        raw.initialise()
        raw.join()
        reply = raw.connection.call("control", "Status", pb.StatusRequest(run=RUN), pb.StatusReply)
        raw.connection.close()
    status: dict[str, Any] = json.loads(reply.status)
    status["run"] = status["method"]["name"] = name
    status["waits_for"] = reason
    status["learners"] = {name: status["learners"]["raw"]}
    status["num_bytes"] = {f"{name}!": {}, name: {}}
    status["newest_merge"] = {"contributors": [name], "version": 1, "fragment": 0, "scale": 0.5}
    for fragment in status["fragments"]:
        fragment["reason"] = reason
        fragment["ledger"]["discarded"] = {reason: 5}
    monkeypatch.setattr("diloco.exchange.dialling.fetch_status", lambda *_, **__: status)
    app = typer.Typer()
    app.command()(command)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--address", "127.0.0.1:1", "--run", RUN])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output
    assert result.output.count(printable(name)) >= 3
    assert printable(reason) in result.output


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_never_breaks_the_report(name: str, tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        log.append(events.SyncerStarted(run=RUN, address=name, versions=(0,), method={"name": name}))
        log.append(events.Initialised(learner=name, source=name, layout_digest="0", num_parameters=10))
        log.append(events.Joined(learner=name, incarnation=1))
        log.append(events.Refused(call="Join", name=name, peer=name, reason=name, text=name))
        log.append(events.Merged(
            fragment=0, round=0, version=1, contributors=(name,), weights=(1.0,), tokens=(5,), members=(name,),
        ))  # fmt: skip
        log.append(events.Evicted(learner=name, incarnation=1, reason=name))
        log.append(events.Traffic(learner=name, sent_bytes={}, received_bytes={}))
    timeline, story = read_run([tmp_path])
    write_page(tmp_path / "page.html", story)
    data = (tmp_path / "page.html").read_text().partition('id="frozen">')[2].partition("</script>")[0]
    assert "<" not in data
    shown = json.loads(data)
    assert shown["learners"][0]["name"] == printable(name)
    assert all(each["text"].isprintable() for each in shown["events"])
    found = numbers(timeline)
    assert rows(found)
    assert summary(found)


def test_what_a_syncer_refuses_with_is_one_line() -> None:
    class Refusal(grpc.RpcError):
        def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
            return ((ERROR_KEY, "AuthError"),)

        def details(self) -> str:
            return "no\x1b[31m\n" * 10_000

    error = from_rpc_error(Refusal(), "127.0.0.1:1")
    assert isinstance(error, errors.AuthError)
    assert str(error).startswith(r"no\x1b[31m\nno")
    assert len(str(error)) < 10 * MAX_TEXT


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "evicted %s", ("a\nERROR all is lost\x1b[2J",), None)
    assert PlainFormatter("%(levelname)s %(message)s").format(record) == r"WARNING evicted a\nERROR all is lost\x1b[2J"


def test_a_traceback_in_a_log_is_printable() -> None:
    try:
        raise ValueError("all is lost\x1b[2J")
    except ValueError as error:
        record = logging.LogRecord("x", logging.CRITICAL, "", 0, "failed", (), (ValueError, error, error.__traceback__))
    lines = PlainFormatter("%(message)s").format(record).split("\n")
    assert lines[:2] == ["failed", "Traceback (most recent call last):"]
    assert lines[-1] == r"ValueError: all is lost\x1b[2J"


def test_a_long_run_name_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        with pytest.raises(errors.UnknownRunError, match="serves run 'tiny', not 'x.*") as caught:
            raw.join(run="x\n" * 1_000_000)
        raw.connection.close()
    assert len(str(caught.value)) <= MAX_TEXT + 3
