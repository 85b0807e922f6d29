"""What a run has written down, on one page: any run, real or simulated."""
