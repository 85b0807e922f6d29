"""Runs in virtual time, with the real trainer and syncer. Needs torch; `diloco.planning` describes sites and tapes."""
