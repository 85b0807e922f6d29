"""Addresses: "host:port" or "unix:/path", several with commas between them; and which of them are local."""

from __future__ import annotations

import ipaddress

from diloco.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """ "host:port", "[::1]:port" or ":port" (all interfaces) as host without brackets, and port.

    Raises:
        ConfigError: anything else.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"{address!r} is not an address; write host:port, for example 0.0.0.0:7700 or [::1]:7700.")
    return (host[1:-1] if bracketed else host), int(port)


def split_addresses(addresses: str) -> list[str]:
    """ "host:port,host:port" as one or several addresses, which are not checked.

    Raises:
        ConfigError: an address occurs twice.
    """
    each = [address.strip() for address in addresses.split(",")]
    if len(set(each)) < len(each):
        raise ConfigError(f"{addresses!r} names an address twice; give each syncer's once.")
    return each


def socket_path(address: str) -> str | None:
    """The path of "unix:/path"; None for other addresses.

    Raises:
        ConfigError: a path that is not absolute.
    """
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    if not path.startswith("/"):
        raise ConfigError(f"{address!r} has no absolute path; write for example unix:/run/diloco/syncer.sock.")
    return path


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address. Raises ConfigError as `split_address` and `socket_path`."""
    return socket_path(address) is not None or is_loopback(split_address(address)[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host name or IP address. Names other than localhost are not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
