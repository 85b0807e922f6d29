"""One run in one process and in virtual time: the driver, and each learner's `SessionCore`, over a network that
takes the time it is given.

    turns.py       learners' threads take turns; whose turn it is follows from virtual time
    delivery.py    what is on its way, and when it arrives; faults
    doors.py       what learners reach at a syncer's address
    client.py      carries out what a learner's `SessionCore` decides
    replicas.py    the fragments that learners fetch, decoded once for all of them
    syncer.py      the driver, its jobs and writes done at once
    run.py         a run: the world that its learners live in, and all of the above
"""
