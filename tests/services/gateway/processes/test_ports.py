"""Addresses for several processes: held for them, and from everybody else."""

import socket
from contextlib import ExitStack

import pytest

from twostroke.errors import ConfigError
from twostroke.services.gateway.processes.ports import held
from twostroke.services.settings import GatewaySettings, split_address
from twostroke.services.supervisor.machine import listen_error


def listening(address: str) -> socket.socket:
    """As the processes do."""
    it = socket.socket()
    it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    it.bind(split_address(address))
    it.listen()
    return it


def test_free_ports_are_drawn_and_held() -> None:
    wanted = GatewaySettings(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", processes=2)
    with held(wanted) as placed, ExitStack() as stack:
        places = (placed.listen, placed.http_place, placed.metrics_listen)
        assert len({split_address(place)[1] for place in places} - {0}) == 3
        assert placed.admin_listen == ""
        for place in places:
            assert listen_error(place)
            for _ in range(2):
                stack.enter_context(listening(place))
        with pytest.raises(ConfigError, match=r"listen: cannot listen on 127\.0\.0\.1"), held(placed):
            pass
        with socket.create_connection(split_address(placed.listen), timeout=5):
            pass  # one of those that listen has it
    assert listen_error(placed.listen) is None


def test_a_body_that_fails_is_not_taken_for_an_address_in_use() -> None:
    wanted = GatewaySettings(listen="127.0.0.1:0", http_listen="off")

    def body() -> None:
        with held(wanted) as placed:
            assert placed.http_place == ""
            raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        body()
