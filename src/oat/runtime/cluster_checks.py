"""Checks of the place of a cluster, and the errors if there can be none."""

import os
import socket

from oat.errors import ConfigError

_CONNECT_S = 5.0
"""Longest time in seconds until a cluster answers at its address."""
_PORT = "RAY_GCS_SERVER_PORT"
"""The environment variable that fixes a port of a cluster which is started here."""
NO_RAY = "compute.runtime ray needs the package ray, which is not installed; pip install 'oat-align[ray]'"


def refuse_taken_port() -> None:
    """Refuse to start a cluster at a port that is taken. Ray itself would try for 40 seconds. Unless the
    environment fixes one, Ray takes ports that are free.

    Raises:
        ConfigError: the port is no number, or another process has it.
    """
    port = os.environ.get(_PORT)
    if not port:
        return
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("", int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the environment variable {_PORT} is {port}, and no cluster can be started at this port "
            f"({error}); end the process that has it, or remove the variable: Ray then takes a free port"
        ) from None


def refuse_silent(address: str) -> None:
    """Refuse an address at which nothing answers. Ray itself would try for minutes.

    Raises:
        ConfigError: it is no address, or nothing answers.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise _silent(address, "this is no address of the form host:port")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise _silent(address, error) from None


def no_cluster(address: str | None, why: Exception | str) -> ConfigError:
    """Return the error that no cluster can be used.

    Args:
        address: at which something answers, as host:port; None: a cluster was to be started on this machine.
    """
    if address is None:
        return ConfigError(
            f"no Ray cluster can be started on this machine ({why}); mend this, or set compute.runtime to "
            "local"
        )
    return ConfigError(
        f"something answers at {address}, but no Ray cluster lets this process in ({why}); give the address "
        "with which the other machines joined the cluster, its token in RAY_AUTH_TOKEN, with "
        "RAY_AUTH_MODE=token, and install its version of Ray; or remove compute.address"
    )


def _silent(address: str, why: Exception | str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster can be used at {address} ({why}); start one with `ray start --head`, and give its "
        "address as host:port; or remove compute.address"
    )
