"""The device that an engine runs on: whether it can be used, and its memory."""

import logging
import os
import time

import torch

from ..errors import ConfigError
from .memory_plan import gib

log = logging.getLogger(__name__)

WAIT_S = 10.0
_RETRY_S = 0.25


def check_device(device: str) -> None:
    """ConfigError (device) where torch cannot use it; a GPU becomes the calling thread's current one.

    So nothing that is made without a word on the device gives this process a context on another one.
    """
    try:
        torch.empty(0, device=device)
        if torch.device(device).type == "cuda" and torch.device(device).index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(f"device {device} cannot be used: {str(error).splitlines()[0]}", field="device") from error


def device_memory(device: str) -> int:
    """Bytes that the device has in all; of a CPU, the machine's; 0 where it is not known."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def await_memory(device: str, nbytes: int, wait_s: float = WAIT_S) -> None:
    """Returns once a GPU has `nbytes` free; nothing tells when a dead predecessor's memory is.

    Raises ConfigError (gpu_memory) after `wait_s` seconds: others have taken it.
    """
    until = time.monotonic() + wait_s
    while (free := torch.cuda.mem_get_info(device)[0]) < nbytes:
        if time.monotonic() >= until:
            raise ConfigError(
                f"gpu_memory: {gib(nbytes)} GiB are wanted, {gib(free)} GiB are free: other processes use {device}; "
                "lower it, or end them",
                field="gpu_memory",
            )
        log.warning("%s GiB of %s are free, %s are wanted; trying again", gib(free), device, gib(nbytes))
        time.sleep(_RETRY_S)
