"""`anytorch port`: source that names CUDA, rewritten to PyTorch that names no vendor. See `rewrite` and `files`."""
