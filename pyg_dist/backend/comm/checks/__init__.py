"""Checks above every wire that ranks make the same calls and hold the same replicas."""
