"""Models that answer: at the command line and in servers."""
