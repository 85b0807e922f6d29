"""Roles of decentralised reinforcement learning: rollout, reward, trainer."""
