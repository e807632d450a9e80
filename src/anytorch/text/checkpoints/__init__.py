"""Hugging Face folders of text models. Importing this package imports nothing else, and no module in it imports torch.

locate      a model's name → the folder it lies in
spec        what its config.json says, as plain data                          (no NumPy either)
checkpoint  its safetensors files, read lazily                                (NumPy)
weights     its tensors under our own names, whatever the checkpoint's are    (NumPy)
"""
