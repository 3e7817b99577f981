"""One question per file: what the project measures about itself."""
