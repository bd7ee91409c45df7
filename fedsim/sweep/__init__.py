"""Many runs on one cluster: grids, searches, and sending them there."""
