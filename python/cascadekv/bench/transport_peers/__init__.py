"""Measures how fast other transports move batches of blocks between two processes of this host."""
