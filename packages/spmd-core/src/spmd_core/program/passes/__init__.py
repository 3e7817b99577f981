"""What happens to a program between its recording and its lowering, one pass a file."""
