"""Scaling out with Ray: the service on Ray Serve (`deploy`), large files with Ray Data (`files`). Needs `anytorch[ray]`.

Importing the package imports no Ray.
"""
