"""The ops of the device, a file per family. Each has `register(library)`."""
