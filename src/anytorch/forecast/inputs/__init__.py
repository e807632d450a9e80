"""The input of a forecast: arguments, tables and times in, one checked and scaled series out."""
