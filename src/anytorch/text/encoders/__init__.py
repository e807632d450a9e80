"""Text encoders in torch: one module for every family of `EncoderSpec`, on any torch device.

layers      the module: token-wise products, attention through a layout
layouts     packed, one by one, or padded rows: how a batch lies in memory, attention within it, and pooling
loading     weights onto the device, tensor by tensor
calibrate   rounding each layer to few bits as it is loaded
shapes      which fixed shapes a batch is cut into (pure)
strategy    which layout is fastest here, measured once and remembered
encoder     TorchEncoder: batches in, vectors out, the next one sent before the last one is fetched
wordpiece   BERT's tokenizer in C++, for devices that encode faster than the Rust one makes tokens (no torch)

Importing this package imports nothing else; every module in it but `wordpiece` imports torch.
"""
