"""The planner: utilisation, wall clock, goodput, scaling laws, advice. Nothing here imports torch."""
