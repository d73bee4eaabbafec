"""gguftools."""
