"""Imported last by the server of `tests.processes`: what it has imported is no garbage of what it forks."""

import gc

gc.collect()
gc.freeze()
