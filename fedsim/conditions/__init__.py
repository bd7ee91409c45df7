"""Conditions of an experiment between server and clients, a section of its file each."""
