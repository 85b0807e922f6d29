"""The path of one contribution, from `Learner.step` to the notice of the version that contains it.

A learner trains over gRPC against a syncer in the same process. A profiler sees every call on every thread. What is
counted: at each `WAYPOINT`, where the contribution, or the version that it has become, is handed to a state machine, to
another thread, to the network or to the store, all functions of the package on the stack of that thread, and the files
that they are in. Functions that return before a waypoint is reached (arithmetic, messages, bookkeeping) are not on the
path, and lambdas and comprehensions belong to the function that contains them. The profiler is on from the call of
`Learner.step` that sends until every waypoint has been passed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import diloco
from diloco.core.global_fragment import close
from diloco.exchange.wire.outgoing import OutgoingUpload
from diloco.learner.error_feedback import ErrorFeedback
from diloco.protocol.publishing import Publisher
from diloco.protocol.session.session_core import SessionCore
from diloco.protocol.syncer import SyncerCore
from diloco.run.driver import Driver
from diloco.run.tensor_jobs import TensorJobs
from diloco.store.directory import Directory
from diloco.syncer.door.messages import WatchStream
from diloco.syncer.server import Options, Syncer

MOST_FILES, MOST_FUNCTIONS = 23, 64

WAYPOINTS = (
    SessionCore.offered,  # the training thread offers the contribution
    ErrorFeedback.encode,  # a thread of the learner encodes it
    OutgoingUpload.messages,  # a thread of gRPC sends it
    Driver.begin_push,  # a thread of the syncer makes room for it
    Driver.complete_push,  # all of it has arrived
    TensorJobs.check,  # another thread checks it
    SyncerCore.contributed,  # it is accepted, and its round closed
    close,  # another thread merges the round
    SyncerCore.merged,
    Directory.put,  # another thread stores the new version
    Publisher.change,  # a commit names it
    Directory.swap,  # another thread swaps the manifest
    SyncerCore.stored,  # the version is published
    WatchStream.standing,  # a notice of it is handed to the learner's stream
    WatchStream.notices,  # a thread of the syncer sends the notice
    SessionCore.heard,  # a thread of the learner receives it
)

PACKAGE = f"{Path(diloco.__file__).parent}/"


class Profiler:
    """Records the functions on the stack at each waypoint, on all threads that are started while it is set."""

    def __init__(self) -> None:
        self.path = set[CodeType]()
        self._awaited = {code_of(each) for each in WAYPOINTS}
        self._waypoints = frozenset(self._awaited)
        self._is_on = False
        self._changed = threading.Condition()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._is_on or event != "call" or frame.f_code not in self._waypoints:
            return
        with self._changed:
            each: FrameType | None = frame
            while each is not None:
                if each.f_code.co_filename.startswith(PACKAGE) and not each.f_code.co_name.startswith("<"):
                    self.path.add(each.f_code)
                each = each.f_back
            self._awaited.discard(frame.f_code)
            self._changed.notify_all()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record until all waypoints have been passed."""
        self._is_on = True
        yield
        with self._changed:
            assert self._changed.wait_for(lambda: not self._awaited, 300), self._awaited
            self._is_on = False


def code_of(function: Any) -> CodeType:
    """The code of a function, below its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code


@contextmanager
def profiled() -> Iterator[Profiler]:
    profiler, before = Profiler(), (threading.getprofile(), sys.getprofile())
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        yield profiler
    finally:
        threading.setprofile(before[0])
        sys.setprofile(before[1])


def test_the_path_of_a_contribution_is_short(tmp_path: Path) -> None:
    method = diloco.DiLoCo(sync_every=2, codec="int8")
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(learner: diloco.Learner) -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=2)

    with profiled() as profiler, Syncer("path", method, Options("127.0.0.1:0", tmp_path / "state")) as syncer:
        exchange = diloco.connect(syncer.address, run="path", learner="a", initialise=True)
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:
            for _ in range(3):
                step(learner)
            with profiler.on():
                step(learner)
    files = {code.co_filename for code in profiler.path}
    found = sorted(f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}" for code in profiler.path)
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))
    assert len(profiler.path) <= MOST_FUNCTIONS, "\n".join(found)
