"""Optimizers that do not wait for the device to check gradients: on this device torch's own."""

from torch.optim import SGD as SGD
from torch.optim import Adam as Adam
from torch.optim import AdamW as AdamW
