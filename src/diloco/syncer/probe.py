"""The syncer's end of a link probe: drops what arrives, reports its rate, and sends as much as was asked for."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

from diloco.errors import ConfigError, RunError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.incoming import Progress
from diloco.exchange.wire.probe import MAX_PROBE_BYTES, noise, timing


class Prober:
    """One probe at a time: two would measure each other, and together take more of the link than one is allowed."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def answer(self, header: pb.ProbeHeader, stream: Iterator[bytes]) -> Iterator[bytes]:
        """The messages that answer a probe whose bytes come by `stream`.

        Raises:
            ConfigError: it asks for more than one probe may carry. RunError: another one is under way.
        """
        most = max(header.up_bytes, header.down_bytes)
        if most > MAX_PROBE_BYTES:
            raise ConfigError(f"a probe of {most} bytes is too large; send up to {MAX_PROBE_BYTES} each way.")
        if not self._busy.acquire(blocking=False):
            raise RunError("another learner's link is being measured; measure again in a minute.")
        try:
            num_bytes, seconds = yield from _taking(stream, header.up_bytes)
            yield pb.ProbeReply(num_bytes=num_bytes, seconds=seconds).SerializeToString()
            yield from noise(header.down_bytes)
        finally:
            self._busy.release()


def _taking(stream: Iterator[bytes], num_bytes: int) -> Generator[bytes, None, tuple[int, float]]:
    """As `timing`; says to the sender how much has arrived."""
    chunks, progress = timing(stream, num_bytes), Progress()
    while True:
        try:
            arrived = next(chunks)
        except StopIteration as ended:
            found: tuple[int, float] = ended.value
            return found
        if progress.is_due():
            yield pb.ProbeReply(received=pb.Received(num_bytes=arrived)).SerializeToString()
