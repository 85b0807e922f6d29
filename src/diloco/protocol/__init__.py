"""Who does what when: state machines without clock, socket, thread or tensor."""
