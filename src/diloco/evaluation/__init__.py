"""What a trained model can do: held-out loss and task scores of exported models, with intervals (docs/evaluate.md)."""
