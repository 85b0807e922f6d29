"""Membership, rounds and sessions: state machines without clock, socket, thread or tensor."""
