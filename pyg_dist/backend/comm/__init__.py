"""Process groups and what travels in their messages."""
