"""The service: the engines behind HTTP, with a web page. `anytorch serve` starts it; `app.create_app` makes the ASGI app.

The way a request goes: `limits` (who may ask, and how much), `routes/` (one small file per job, translation only),
`models` (which engine), the engine's own queue. `server` runs the app in one process or several.
"""
