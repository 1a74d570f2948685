"""Pure functions of arrays."""
