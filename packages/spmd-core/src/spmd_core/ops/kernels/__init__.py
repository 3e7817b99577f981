"""Code that several families of operations share; nothing here registers an overload."""
