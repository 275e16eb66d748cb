"""The KV engines: what each keeps of a session, behind one protocol and one registry."""
