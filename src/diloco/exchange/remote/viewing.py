"""What a viewer may ask of a syncer: the newest model, and how the run goes."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from diloco.core.fragments import Layout, scatter
from diloco.errors import NotInitialisedError, StandbyError
from diloco.exchange.dialling import dialler, found
from diloco.exchange.remote.transfers import whole_of
from diloco.exchange.wire import syncer_pb2 as pb


def fetch_model(
    address: str, *, run: str, keys: str | Path | None = None, token: str | None = None, ca: str | Path | None = None,
    insecure: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """The run's newest global model: name to tensor in the parameters' dtypes, frozen ones and buffers too, but for a
    base that every learner brings. For viewers.

    Raises:
        ExchangeError: no syncer answers. NotInitialisedError: there is no model yet. AuthError: the keys or token
            may not read.
    """
    with closing(dialler(address, keys=keys, token=token, ca=ca, insecure=insecure)) as syncers:
        description = found(syncers, run)
        if not description.initialised:
            raise NotInitialisedError(f"run {run!r} has no model yet; start one learner with --initialise.")
        layout = Layout.from_dict(json.loads(description.layout))
        model: dict[str, Tensor] = {}
        for fragment in layout.fragments:
            header, buffer = syncers.pull("joins", pb.PullRequest(run=run, fragment=fragment.index, base=-1))
            theta = whole_of(header, buffer, fragment.numel).held.theta
            for name, value in scatter(fragment, theta).items():
                spec = next(place.spec for place in fragment.tensors if place.spec.name == name)
                model[name] = value.to(getattr(torch, spec.dtype))
        _, static = syncers.pull("joins", pb.PullRequest(run=run, static=True, base=-1))
        return {**model, **load(bytes(static))}


def fetch_status(
    address: str, *, run: str, keys: str | Path | None = None, token: str | None = None, ca: str | Path | None = None,
    insecure: bool = False,
) -> dict[str, object]:  # fmt: skip
    """What the syncer that serves a run knows of it, as plain values; where none of several does, what the first that
    answers knows. For viewers. Raises as `fetch_model`."""
    with closing(dialler(address, keys=keys, token=token, ca=ca, insecure=insecure)) as syncers:
        if syncers.num_addresses > 1:
            with suppress(StandbyError):
                found(syncers, run)
        reply = syncers.call("control", "Status", pb.StatusRequest(run=run), pb.StatusReply)
        status: dict[str, object] = json.loads(reply.status)
        return status
