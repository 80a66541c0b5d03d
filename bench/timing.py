"""How the peers' side is timed; `fedproj bench` does the same."""
import time
from statistics import median

import torch


def clock(device):
    """Seconds, once the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def middle(seconds):
    """The median without the first third, which warms up."""
    return median(seconds[len(seconds) // 3 :])
