"""Learners in the training loops of other libraries: one module per library, which imports that library."""
