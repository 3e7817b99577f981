"""Every way to say where a tensor's blocks shall live."""
