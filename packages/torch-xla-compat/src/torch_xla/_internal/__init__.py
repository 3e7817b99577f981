"""Private modules that test programs import."""
