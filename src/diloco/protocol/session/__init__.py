"""A learner's session with a syncer, without sockets, threads and clocks."""

from diloco.protocol.session.session_core import SessionCore

__all__ = ["SessionCore"]
