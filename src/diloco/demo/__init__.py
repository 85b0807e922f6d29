"""`diloco demo`: a run on one machine with real processes, a kill, a baseline and a report."""
