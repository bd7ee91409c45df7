"""Privacy attacks on finished runs."""
