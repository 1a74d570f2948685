"""Implementations by tiles of rows and columns, in memory linear in the length, for any device."""
