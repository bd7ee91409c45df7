"""What every package may use: random numbers, files, words, hardware."""
