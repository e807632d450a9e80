"""Layers: tensors that are learned, and the functions they are used in."""
