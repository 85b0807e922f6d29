"""What things cost, as ratios measured in the same run."""
