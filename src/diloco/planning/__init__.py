"""What will it cost? Utilisation, wall clock, goodput, scaling laws. Nothing here imports torch."""
