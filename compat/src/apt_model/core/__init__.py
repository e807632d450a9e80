"""Virtual Blackwell's core: see `apt_model.core.system`."""
