"""TensorBoard, W&B, trackio and MLflow: the numbers of a run in the trackers that its people use."""

THREADS = "tracking-"
"""How the name of a tracker's thread begins. One that is alive at the end of its process was left alone."""
