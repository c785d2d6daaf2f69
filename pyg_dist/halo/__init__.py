"""Rows of nodes by part, halos of remote rows."""
