"""Code that several families of operations share; it registers no overload."""
