"""Attach a learner to a training loop that is not ours: one module per library, which imports that library."""
