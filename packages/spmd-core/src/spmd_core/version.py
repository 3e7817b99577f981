"""The version of this package, which its build reads from here."""

__version__ = "0.1.0.dev0"
