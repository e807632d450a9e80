"""What a forecast is asked with: arguments, tables and times in, one checked and scaled series out."""
