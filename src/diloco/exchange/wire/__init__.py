"""The wire between learners and a syncer, shared by both ends: messages, framing of bulk bytes, errors, addresses."""
