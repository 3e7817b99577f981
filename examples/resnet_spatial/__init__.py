"""ResNet over images split by rows and columns: `python -m examples.resnet_spatial.train`."""
