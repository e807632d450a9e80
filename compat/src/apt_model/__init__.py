"""Virtual Blackwell's import paths over anytorch."""
