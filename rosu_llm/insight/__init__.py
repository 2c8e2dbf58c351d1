"""Pictures and tables of what happened."""
