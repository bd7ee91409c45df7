"""Results on disk: run folders and tables."""
