"""Code that is one device's own: manual regions and their collectives."""
