"""A learner's session with a syncer, without sockets, threads and clocks."""
