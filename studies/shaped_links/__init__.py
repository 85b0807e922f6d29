"""Prediction against measurement: the real syncer and learners on links of known rate, beside what `diloco.planning`
says of them."""
