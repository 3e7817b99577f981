"""Optimizers that never wait for the device to learn whether a gradient is finite: on this device torch's own do not."""

from torch.optim import SGD as SGD
from torch.optim import Adam as Adam
from torch.optim import AdamW as AdamW
