"""Privacy: calibrated noise, and what it guarantees."""
