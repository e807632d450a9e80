"""WGSL generators: plain data in, shader text out. No device is needed to use or test them."""
