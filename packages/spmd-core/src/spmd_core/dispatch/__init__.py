"""Which way each overload goes: recorded, composed, read on the host, or refused."""
