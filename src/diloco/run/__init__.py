"""The driver of `SyncerCore` and its ports: one run, behind gRPC, in one process, or in virtual time.

    driver.py        Driver: every call is an event, which is checked and entered into `SyncerCore`
    run_state.py     RunState: the state machine and the published model of one run
    executor.py      ActionExecutor: executes the actions of `SyncerCore`, and makes durable what they need
    uploads.py       the payloads of contributions, from their uploads until their rounds are closed
    ports.py         what differs between the settings: clock, connections to learners, spool, worker, store, observer
    objects.py       a store: immutable objects, and one manifest that is swapped if it is still the one that was read
    published.py     PublishedStore: the store of `ports.py` over `objects.py`, as `protocol.publishing` rules
    global_model.py  the newest version of each fragment and the updates that led to it
    validation.py    checks of what a learner says, before a number of it is counted
    status.py        what `diloco status` shows
    experts.py       which experts of a mixture each learner trains
    tensor_jobs.py   the tensor jobs behind every worker: check a payload, close a round
    memory.py        a spool and a store in memory
    journal/         the journal of a driver's events, and replay

No module but tensor_jobs.py imports tensor code.
"""
