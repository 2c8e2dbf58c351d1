"""Is it still gone at 8 and at 4 bits? An update smaller than the rounding vanishes in it."""
