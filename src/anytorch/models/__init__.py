"""Models that read Hugging Face folders. Importing this package imports nothing else: torch is for those who need it.

spec        what a checkpoint's config.json says, as plain data               (no torch, no NumPy)
checkpoint  its safetensors files, read lazily                                (NumPy)
weights     its tensors under our own names, whatever the checkpoint's are    (NumPy)
"""
