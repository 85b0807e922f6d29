"""`diloco simulate`: the real trainer and syncer in virtual time. Needs torch; what it is told comes from
`diloco.planning`."""
