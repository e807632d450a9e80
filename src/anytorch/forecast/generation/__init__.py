"""The loop over steps: prompts in, generated ids out, recorded where the device can."""
