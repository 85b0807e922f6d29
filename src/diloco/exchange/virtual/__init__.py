"""One run in one process and in virtual time: the driver, and each learner's `SessionCore`, over a network whose
transfers take the given time.

    turns.py       the scheduler of the learners' threads
    delivery.py    messages and transfers in flight; faults
    syncer.py      the syncer that learners reach, its jobs and writes done at once; versions, decoded once for all
    learners client.py      executes the actions of a learner's `SessionCore` run.py         a run: scheduler, network
    and syncer
"""
