"""Shared by all packages: random numbers, files, words, hardware."""
