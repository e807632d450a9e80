"""Engines: a model, its device and everything around it, ready to answer. Importing this package imports nothing."""
