"""The algorithm: pure functions and sans-I/O state machines."""
