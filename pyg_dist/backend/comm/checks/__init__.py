"""What ranks must do and have alike, checked above every wire: calls, replicas, the order of calls without tags."""
