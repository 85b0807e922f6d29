"""Two syncers of one run: the first's end, the standby's, the copy between them."""
