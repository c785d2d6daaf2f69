"""Start and end of a run: who this process is, where ranks meet, what they must agree on, how they fail."""
