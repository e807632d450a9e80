"""Text: encoders that turn it into vectors, decoders that generate it. Importing this package imports nothing.

checkpoints   a name → a folder → what its config.json says and its tensors (no torch)
packed        encoders in our own C++ over packed tokens, for CPUs (no torch, but for what lends kernels to graphs)
encoders      the same families in torch, on any device
embed         `ArrowEngine`, its queue, pool and files
generate      `TextGenerator`, its scheduler and streams
"""
