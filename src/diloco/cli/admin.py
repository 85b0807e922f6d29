"""`diloco admin`: orders to a live run (`protocol.steering`)."""

from typing import Annotated

import typer

from diloco.cli._options import Json
from diloco.cli._output import print_result
from diloco.cli._run_address import RunAddress, takes_run_address
from diloco.protocol.steering import Order

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ANSWER_TIMEOUT_S = 60.0
"""The syncer answers after the order is durable."""

Learner = Annotated[str, typer.Argument(metavar="LEARNER", help="Name of the learner.")]
Reason = Annotated[str, typer.Option(help="The reason, shown to those who watch the run.")]


@app.callback()
def admin() -> None:
    """Steer a live run: evict or drain a learner, pause the run, change its quorum, end it.

    Requires keys with the role admin if the syncer has keys."""


@app.command()
@takes_run_address
def evict(
    learner: Learner,
    at: RunAddress,
    ban: Annotated[bool, typer.Option("--ban", help="Refuse the learner until `diloco admin admit`.")] = False,
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Evict a learner now. Its unacknowledged work is lost; its process rejoins with the newest model."""
    _send(at, Order("evict", learner, bans=ban, reason=reason), as_json)


@app.command()
@takes_run_address
def quorum(
    at_least: Annotated[int, typer.Argument(metavar="N", min=1, help="The fewest learners of a round.")],
    at: RunAddress,
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Require N learners for every merge from now on, instead of the method's quorum."""
    _send(at, Order("quorum", at_least=at_least, reason=reason), as_json)


@app.command()
@takes_run_address
def drain(learner: Learner, at: RunAddress, reason: Reason = "", as_json: Json = False) -> None:
    """Let a learner send its last work, save and leave. It cannot rejoin before `diloco admin admit`."""
    _send(at, Order("drain", learner, reason=reason), as_json)


@app.command()
@takes_run_address
def admit(learner: Learner, at: RunAddress, reason: Reason = "", as_json: Json = False) -> None:
    """Let a drained or banned learner join again."""
    _send(at, Order("admit", learner, reason=reason), as_json)


@app.command()
@takes_run_address
def end(at: RunAddress, reason: Reason = "", as_json: Json = False) -> None:
    """End the run: every learner sends its last work, saves and leaves, and no learner can join."""
    _send(at, Order("end", reason=reason), as_json)


@app.command()
@takes_run_address
def pause(at: RunAddress, reason: Reason = "", as_json: Json = False) -> None:
    """Stop merging until `resume`; learners stop after their next step."""
    _send(at, Order("pause", reason=reason), as_json)


@app.command()
@takes_run_address
def resume(at: RunAddress, reason: Reason = "", as_json: Json = False) -> None:
    """Continue after `pause`; after `end`, let learners join again."""
    _send(at, Order("resume", reason=reason), as_json)


def _send(at: RunAddress, order: Order, as_json: bool) -> None:
    """Send an order and print the syncer's answer."""
    from diloco.exchange.wire import syncer_pb2 as pb

    request = pb.SteerRequest(
        run=at.run, order=order.what, learner=order.learner, at_least=order.at_least, bans=order.bans,
        reason=order.reason,
    )  # fmt: skip
    said = at.call("Steer", request, pb.SteerReply, ANSWER_TIMEOUT_S).said
    print_result(as_json, {"said": said}, said)
