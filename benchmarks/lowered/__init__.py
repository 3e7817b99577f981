"""Compares the StableHLO of programs before and after a change of how they are lowered."""
