"""Roles of reinforcement learning: rollout and reward workers, and trainers."""
