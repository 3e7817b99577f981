"""The passes that rewrite a program between recording and lowering, one in each file."""
