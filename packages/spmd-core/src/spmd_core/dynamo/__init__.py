"""torch.compile: Dynamo traces programs of the device, and the backend records their graphs."""
