"""Whose doing a result is: outcomes without clients, contributions, and estimates of these."""
