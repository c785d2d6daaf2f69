"""What people read: about the installation, plans and runs."""
