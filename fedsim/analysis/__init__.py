"""What can be learnt of a finished run: models replayed, explained and attacked."""
