"""Authentication of callers: authorities, certificates, revocation."""
