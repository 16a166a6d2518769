"""Code that would make the host and the device wait for each other is refused, on a CPU too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from llmstack_kernels.graph_safety import HostSynchronisationError, host_stands_in, no_host_synchronisation

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "an array": np.asarray,
    "a condition": lambda x: bool(x[0]),
    "an int": lambda x: int(x[0]),
    "a float": lambda x: float(x[0]),
    "an index of a list": lambda x: list(range(9))[x[0]],
    "a range": lambda x: range(x[0]),  # type: ignore[call-overload]  # tensors have __index__
    "membership": lambda x: 1 in x,
    "equality of all": lambda x: torch.equal(x, x),
    "closeness of all": lambda x: torch.allclose(x, x),
    "printing": lambda x: f"{x}",
    "printing one": lambda x: f"{x[0]:d}",
}
SHAPES: dict[str, Callable[[torch.Tensor], object]] = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "an index by a mask": lambda x: x[x > 1],
    "a store by a mask": lambda x: x.__setitem__(x > 1, x[:2].clone()),
    "repeats": lambda x: x.repeat_interleave(x),
    "bincount": lambda x: x.bincount(),
}
SENDS: dict[str, Callable[[torch.Tensor], object]] = {
    "to a device": lambda x: x.to("cpu"),
    "to a device by keyword": lambda x: x.to(device=torch.device("cpu")),
    "a tensor of a list": lambda x: torch.tensor([1, 2], device=x.device),
    "a tensor of a number": lambda x: torch.tensor(1, device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1]),
    "an index by a list": lambda x: x[[0, 2]],
    "a store by a list": lambda x: x.__setitem__([0, 2], 1),
    "an index by an array": lambda x: x[np.array([0, 2])],
    "pinned memory": lambda x: x.pin_memory(),
    "a tensor on no named device": lambda x: torch.zeros(4),
    "a range on no named device": lambda x: torch.arange(4),
}
HARMLESS: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda x: torch.softmax(x.float() * 2 + 1, dim=0),
    "types": lambda x: x.to(torch.int32).to(x),
    "gathers": lambda x: x[x.clamp(0, 1)],
    "slices and None": lambda x: x[None, 1:, ...],
    "stores at places": lambda x: x.clone().index_put_((x,), x),
    "masked fills": lambda x: torch.where(x > 1, x, 0).masked_fill(x > 2, 1),
    "scratch on the device": lambda x: (torch.empty(4, device=x.device), x.new_zeros(3), torch.zeros_like(x)),
    "repeats of a known number": lambda x: x.repeat_interleave(x, output_size=6),
    "nonzero of a known number": lambda x: torch.nonzero_static(x, size=4),
    "pointers and shapes": lambda x: (x.data_ptr(), x.shape, len(x), x.numel(), x.stride()),
    "copies in place": lambda x: x.clone().copy_(x),
}


@pytest.mark.parametrize("name", READS | SHAPES | SENDS)
def test_what_makes_host_and_device_wait_is_refused(name: str) -> None:
    call, x = (READS | SHAPES | SENDS)[name], torch.arange(4)
    with no_host_synchronisation(), pytest.raises(HostSynchronisationError):
        call(x)


@pytest.mark.parametrize("name", READS | SHAPES)
def test_the_same_is_fine_outside(name: str) -> None:
    x = torch.arange(4)
    with no_host_synchronisation():
        pass
    (READS | SHAPES)[name](x)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_the_device_does_alone_is_allowed(name: str) -> None:
    x = torch.arange(4)
    with no_host_synchronisation():
        HARMLESS[name](x)


def test_a_read_deep_inside_pytorch_is_refused_too() -> None:
    classes = torch.arange(4)
    with no_host_synchronisation(), pytest.raises(HostSynchronisationError, match="_local_scalar_dense"):
        torch.nn.functional.one_hot(classes)  # looks for the largest class


def test_what_stands_in_for_a_kernel_may_read_values() -> None:
    x = torch.arange(4)
    with no_host_synchronisation():
        with host_stands_in():
            assert x.tolist() == [0, 1, 2, 3]
        with pytest.raises(HostSynchronisationError, match="tolist reads"):
            x.tolist()


def test_kernels_run_inside_as_ever(triton_device: str) -> None:
    from llmstack_kernels.rms_norm import triton as kernels

    x, weight = torch.randn(3, 32, device=triton_device), torch.ones(32, device=triton_device)
    with no_host_synchronisation():
        guarded = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(guarded, kernels.rms_norm(x, weight, 1e-6))
