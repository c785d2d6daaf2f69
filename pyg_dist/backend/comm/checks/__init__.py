"""What ranks must do and have alike, checked above every wire: numbered calls and replicas."""
