"""Reinforcement learning in several places."""
