"""Held-out loss and task scores of exported models, with confidence intervals (docs/your-model.md)."""
