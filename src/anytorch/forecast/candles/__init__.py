"""Candles (open, high, low, close, volume, amount) as tables: generated, read, checked, repaired, drawn. No torch here.

A series is a pandas DataFrame with the columns `timestamps`, `open`, `high`, `low`, `close`, `volume` and `amount`.
"""
