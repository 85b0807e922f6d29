"""One of two syncers, sans I/O: what makes two syncers one run, besides the learners' votes (`protocol.succession`).

    values.py       what is durable of a syncer's part, what it has, and what one says to the other
    link.py         a connection between the two, at either end, and how far the standby is behind
    pair_core.py    what it may publish, and what changes by time, by learners and by hand
    first_end.py    the first's end of a connection: what it leads, and what goes to the standby next
    standby_end.py  the standby's end: what it says, takes and confirms

What is to be durable before the next decision goes through a port (`values.Durable`), as the driver's does. Time comes
in as an argument. `syncer/` hosts it with files, a lock and sockets, the storms with memory and virtual time.
"""
