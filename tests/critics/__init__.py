"""Critics and credits."""
