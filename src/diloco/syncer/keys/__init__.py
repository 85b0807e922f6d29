"""Who may call: authorities, certificates, revocation."""
