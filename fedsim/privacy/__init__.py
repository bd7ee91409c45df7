"""Privacy: calibrated noise and its guarantees, and attacks."""
