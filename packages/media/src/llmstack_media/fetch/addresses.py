"""Addresses that may be dialled: public ones, and networks of the operator."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_IPV4_COMPATIBLE = ipaddress.IPv6Network("::/96")


def may_dial(text: str, networks: Iterable[Network]) -> bool:
    """Whether an address is globally routable, or in one of the networks. What cannot be parsed is not."""
    try:
        address = unwrapped(ipaddress.ip_address(text))
    except ValueError:
        return False
    if any(address in network for network in networks):
        return True
    return address.is_global and not address.is_multicast and not address.is_reserved


def unwrapped(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for: mapped, of NAT64, or of 6to4."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64 or address in _IPV4_COMPATIBLE:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
