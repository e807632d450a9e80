"""AI-OS Diffusion's import paths over anytorch."""
