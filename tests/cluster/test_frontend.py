"""The front end's own pieces: waiting for a port, reading keys. The end-to-end tests run the whole of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from npufleet.cluster import app, config
from npufleet.cluster.admission.tenants import read_key_file as read_keys
from npufleet.cluster.frontend import bound


async def test_it_waits_for_the_port_of_the_one_before() -> None:
    tries = 0

    async def start() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("address in use")
        return "up"

    assert await bound(start, 10.0) == "up"
    assert tries == 3


async def test_it_gives_up_with_the_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        async def start() -> None:
            with socket.socket() as other:
                other.bind(taken.getsockname())

        with pytest.raises(OSError, match="in use"):
            await bound(start, 0.0)


def test_keys(tmp_path: Path) -> None:
    assert read_keys(None) == ()
    file = tmp_path / "keys"
    file.write_text("# ours\n\n one \ntwo\n")
    assert read_keys(str(file)) == ("one", "two")
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_keys(str(file))
    with pytest.raises(ValueError, match="cannot read"):
        read_keys(str(tmp_path / "absent"))


def test_the_application_is_built_from_plain_arguments() -> None:
    from ray.serve import Application

    arguments = {"models": [{"name": "a", "source": "/a"}, {"name": "b", "source": "/b"}]}
    assert isinstance(app.build(arguments), Application)
    assert app.engine_deployment("a") != app.engine_deployment("b")
    with pytest.raises(ValueError, match="did you mean 'models'"):
        app.build({"model": []})
    assert config.from_dict(arguments).npus == 2
