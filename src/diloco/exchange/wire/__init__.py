"""The wire between learners and a syncer: messages, framing of bulk bytes, errors and addresses. Shared by both ends."""
