"""A pair of syncers: the first's end, the standby's end, and replication between them."""
