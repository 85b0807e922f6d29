"""The story of a run on one machine, told by `diloco demo`: real processes, a kill, a baseline, a report."""
