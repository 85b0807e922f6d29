"""How the syncer is reached: gRPC calls, who is admitted, limits."""
