"""The report of any run, real or simulated, on one page."""
