"""Reinforcement learning in several places: tasks, scores, groups, and the loss of a policy."""
