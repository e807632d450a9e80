"""One small module per command; only the chosen one is imported."""
