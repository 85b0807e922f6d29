"""`diloco admin`: orders to a live run (`protocol.steering`)."""

import json
from collections.abc import Callable
from contextlib import closing
from typing import Annotated

import typer

from diloco.cli._reach import Address, OptionalRunFile, Reach, RunName, reach
from diloco.cli._shared import Insecure, Json, Keys
from diloco.protocol.steering import Order, What

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ANSWER_TIMEOUT_S = 60.0
"""The syncer answers once its disk has the order."""

Learner = Annotated[str, typer.Argument(metavar="LEARNER")]
Reason = Annotated[str, typer.Option(help="Why, for those who watch the run.")]


@app.callback()
def admin() -> None:
    """Steer a live run: evict or drain a learner, pause the run, change its quorum, end it.

    It needs the role admin, where the syncer asks for certificates."""


def _of_a_learner(what: What) -> Callable[..., None]:
    def command(
        learner: Learner, run_file: OptionalRunFile = None, reason: Reason = "", address: Address = None,
        run: RunName = None, keys: Keys = None,
        insecure: Insecure = False, as_json: Json = False,
    ) -> None:  # fmt: skip
        where = reach(run_file, address, run, keys, insecure)
        _give(where, Order(what, learner, reason=reason), as_json=as_json)

    return command


def _of_the_run(what: What) -> Callable[..., None]:
    def command(
        run_file: OptionalRunFile = None, reason: Reason = "", address: Address = None, run: RunName = None,
        keys: Keys = None, insecure: Insecure = False,
        as_json: Json = False,
    ) -> None:  # fmt: skip
        where = reach(run_file, address, run, keys, insecure)
        _give(where, Order(what, reason=reason), as_json=as_json)

    return command


@app.command()
def evict(
    learner: Learner,
    run_file: OptionalRunFile = None,
    ban: Annotated[bool, typer.Option("--ban", help="Nor may it join again before `diloco admin admit`.")] = False,
    reason: Reason = "",
    address: Address = None,
    run: RunName = None,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Put a learner out of the run now. What it has not had acknowledged is lost; its process joins again from the
    newest model."""
    where = reach(run_file, address, run, keys, insecure)
    _give(where, Order("evict", learner, bans=ban, reason=reason), as_json=as_json)


@app.command()
def quorum(
    at_least: Annotated[int, typer.Argument(metavar="N", min=1)],
    run_file: OptionalRunFile = None,
    reason: Reason = "",
    address: Address = None,
    run: RunName = None,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Merge no round with fewer than N learners from now on, whatever the method says."""
    where = reach(run_file, address, run, keys, insecure)
    _give(where, Order("quorum", at_least=at_least, reason=reason), as_json=as_json)


app.command("drain", help="Let a learner send its last work, save and leave. It may join again once it is admitted.")(
    _of_a_learner("drain")
)
app.command("admit", help="Let a learner join again that was drained or banned.")(_of_a_learner("admit"))
app.command("end", help="End the run: every learner sends its last work, saves and leaves, and none may join.")(
    _of_the_run("end")
)
app.command("pause", help="Merge nothing until `resume`; learners stand still after their next step.")(
    _of_the_run("pause")
)
app.command("resume", help="Go on after `pause`; after `end`, let learners join again.")(_of_the_run("resume"))


def _give(where: Reach, order: Order, *, as_json: bool) -> None:
    """Give the order, and say what the syncer says."""
    from diloco.exchange.dialling import found
    from diloco.exchange.wire import syncer_pb2 as pb

    request = pb.SteerRequest(
        run=where.run, order=order.what, learner=order.learner, at_least=order.at_least, bans=order.bans,
        reason=order.reason,
    )  # fmt: skip
    with closing(where.dial()) as syncers:
        found(syncers, where.run)
        reply = syncers.current.call("control", "Steer", request, pb.SteerReply, timeout_s=ANSWER_TIMEOUT_S)
    typer.echo(json.dumps({"said": reply.said}) if as_json else reply.said)
