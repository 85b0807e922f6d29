"""TensorBoard, W&B, trackio and MLflow: the numbers of a run in the trackers that its people use."""
