"""The request of viewers for the newest model."""

from __future__ import annotations

from contextlib import closing

from torch import Tensor

from diloco.core.layout import named_tensors
from diloco.errors import NotInitialisedError
from diloco.exchange.dialling import dialler, found
from diloco.exchange.key_pair import AnyKeys
from diloco.exchange.remote.messages import layout_of
from diloco.exchange.remote.transfers import whole_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.tensors import tensors_of


def fetch_model(
    address: str, *, run: str, keys: AnyKeys | None = None, insecure: bool = False
) -> dict[str, Tensor]:  # fmt: skip
    """The run's newest global model, for viewers: name to tensor in the parameters' dtypes, with frozen parameters and
    buffers, but without a base that every learner has itself.

    Raises:
        ExchangeError: no syncer answers. NotInitialisedError: the run has no model yet. AuthError: the keys do not
            permit reading.
    """
    with closing(dialler(address, keys=keys, insecure=insecure)) as syncers:
        description = found(syncers, run)
        if not description.initialised:
            raise NotInitialisedError(f"run {run!r} has no model yet; start one learner that initialises it.")
        layout = layout_of(description)
        thetas = []
        for fragment in layout.fragments:
            header, buffer = syncers.current.pull("joins", pb.PullRequest(run=run, fragment=fragment.index, base=-1))
            thetas.append(whole_of(header, buffer, fragment.numel).held.theta)
        _, static = syncers.current.pull("joins", pb.PullRequest(run=run, static=True, base=-1))
        return named_tensors(layout, thetas) | tensors_of(static, "the static tensors")
