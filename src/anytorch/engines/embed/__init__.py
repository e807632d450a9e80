"""Text embeddings: the ArrowEngine. Importing this package imports nothing else."""
