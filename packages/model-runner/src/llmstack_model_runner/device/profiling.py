"""Profiles of the operations on a device, by PyTorch's profiler."""

from __future__ import annotations

import os

import torch


class Profiling:
    """Records what is computed on a device, one profile at a time. Used by one thread."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def start(self, device: torch.device, *, with_stack: bool, with_memory: bool, record_shapes: bool) -> None:
        """Begins to record all operations; steps take longer meanwhile."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities, with_stack=with_stack, profile_memory=with_memory, record_shapes=record_shapes
        )
        self._profile.start()

    def stop(self, path: str) -> None:
        """Ends the profile and writes it to `path`, for Perfetto; compressed if that ends in `.gz`.

        Raises:
            OSError: The file cannot be written.
            RuntimeError: The profile is damaged.
        """
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            profile.export_chrome_trace(path)
            if not (os.path.exists(path) and os.path.getsize(path)):  # the library only logs that
                raise OSError(f"cannot write {path}")
