"""How each ATen overload is carried out: recorded, composed, read on the host, or refused."""
