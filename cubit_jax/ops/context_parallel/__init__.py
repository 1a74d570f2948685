"""One sequence over several devices."""
