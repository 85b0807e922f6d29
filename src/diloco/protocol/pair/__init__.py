"""State machines of a pair of syncers that serve one run, sans I/O; the learners' votes are in `protocol.succession`.

    values.py     durable state of a syncer, messages between the two, a connection at either end
    pair_core.py  `PairCore`: when a syncer may publish; effects of time, learners and operators
    endpoints.py  both ends of a connection: the first replicates to the standby, the standby confirms

State that must be durable before the next decision is written through a port (`values.Durable`), as in the driver. Time
is an argument. `syncer/` runs these with files, a lock and sockets, the storms with memory and virtual time.
"""
