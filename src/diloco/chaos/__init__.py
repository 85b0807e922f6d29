"""A whole real run under a seeded schedule of faults, and what it comes to: `diloco chaos`."""
