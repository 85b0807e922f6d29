"""TensorBoard, W&B, trackio and MLflow as trackers of a run."""

THREADS = "tracking-"
"""Prefix of the names of tracker threads. A thread that is alive at the end of its process has been abandoned."""
