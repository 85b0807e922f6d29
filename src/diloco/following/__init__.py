"""Followers: readers of a run, who get every version of its global model and delay no learner."""
