"""Counters and profiles."""
