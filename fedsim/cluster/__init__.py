"""The Ray cluster: reaching one, what fits it, what gets lost on it, and Ray's private sides."""
