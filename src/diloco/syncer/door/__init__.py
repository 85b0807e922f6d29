"""The gRPC interface of a syncer: calls, admission, limits."""
