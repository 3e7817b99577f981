"""Serving over HTTP: cache, sampling, device programs, text, engine, interface, app."""
