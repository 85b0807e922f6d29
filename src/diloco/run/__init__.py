"""The driver of `SyncerCore` and its ports: one run, behind gRPC, in one process, or in virtual time.

    driver.py        Driver: every call is an event, which is checked and entered into `SyncerCore`
    executor.py      ActionExecutor: executes the actions of `SyncerCore`, and makes durable what they need
    uploads.py       the payloads of contributions, from their uploads until their rounds are closed
    ports.py         what differs between the settings: clock, connections to learners, spool, worker, disk, observer
    global_model.py  the newest version of each fragment and the updates that led to it
    validation.py    checks of what a learner says, before a number of it is counted
    status.py        what `diloco status` shows
    tensor_jobs.py   the tensor jobs behind every worker: check a payload, close a round
    memory.py        a spool and a store in memory

No module but tensor_jobs.py imports tensor code.
"""
