"""One router of a directory in a process, whoever asks for it: `anabranch.shared`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.policies.errors import ClosedError, ConfigError, StoreLockedError
from anabranch.router import held_routers

from ..contract.disk import Parallel
from .disk import NEVER


def config(directory: Path, name: str = "all") -> anabranch.Config:
    return anabranch.Config(directory, [anabranch.StoreConfig(name, [">"], journal={"sync": NEVER})])


def is_open(router: anabranch.Router) -> bool:
    try:
        return not router.destinations()
    except ClosedError:
        return False


def test_the_last_of_its_holders_closes_it(tmp_path: Path) -> None:
    """However they name the directory; then it can be opened anew."""
    directory, link = tmp_path / "data", tmp_path / "link"
    link.symlink_to(directory)
    with anabranch.shared(config(directory)) as router:
        assert anabranch.shared(directory) is anabranch.shared(link) is anabranch.shared(config(link)) is router
        router.close()
        with anabranch.shared(str(directory)):
            pass
        router.close()
        router.close()
        assert is_open(router)
        with pytest.raises(StoreLockedError):
            anabranch.open(directory)
    assert not is_open(router)
    router.close()
    with anabranch.shared(directory) as again:
        router.close()  # which is not the one that is held now
        assert again is not router and is_open(again)


def test_nothing_is_kept_of_a_directory_that_is_closed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    with anabranch.shared(config(tmp_path / "data")):
        with pytest.raises(ConfigError):
            anabranch.shared(config(tmp_path / "other"))
        assert [path.name for path in held_routers._places] == ["data"]
    assert not held_routers._places


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    with anabranch.shared(config(tmp_path)) as router:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"open in this process under another configuration: stores differs"):
                anabranch.shared(config(tmp_path, "other"))
        (tmp_path / "stores.yaml").write_text("directory: .\nfile_mode: 0640\nstores: [{name: x, match: ['>']}]\n")
        with pytest.raises(ConfigError, match="stores, file_mode differ"):
            anabranch.shared(tmp_path)
    assert not is_open(router)
    with pytest.raises(TypeError, match="needs to know what to open"):
        anabranch.shared(None)  # type: ignore[arg-type]


def test_one_that_cannot_be_opened_is_held_by_nobody(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)), pytest.raises(StoreLockedError):
        anabranch.shared(tmp_path)
    with anabranch.shared(tmp_path) as router:
        assert is_open(router)
    assert not is_open(router)


def test_many_threads_hold_one(tmp_path: Path) -> None:
    def use(count: int) -> None:
        for _ in range(count):
            with anabranch.shared(config(tmp_path)) as router:
                router.queue("q").send(b"x")

    with Parallel(lambda: use(20)) as one, Parallel(lambda: use(20)) as other:
        one.result(), other.result()
    with anabranch.shared(tmp_path) as router:
        assert router.queue("q").depth() == 40


@pytest.mark.parametrize("shares", [False, True])
def test_a_forked_child_has_its_own(tmp_path: Path, shares: bool) -> None:
    """It is a client that goes on, or is opened anew: what its parent had open for itself is the parent's."""
    (tmp_path / "stores.yaml").write_text("directory: .\nstores: [{name: x, match: ['>'], journal: {sync: never}}]\n")
    with anabranch.shared(tmp_path, shared=shares) as router, anabranch.shared(tmp_path):
        router.queue("q").send(b"1")
        if (child := os.fork()) == 0:
            status = 1
            try:
                found = anabranch.shared(tmp_path, shared=True)
                found.queue("q").send(b"2")
                found.close()
                if shares:
                    assert found is router
                    found.queue("q").send(b"3")
                else:
                    assert found is not router and not is_open(found)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert [message.body for message in router.queue("q").browse()] == [b"1", b"2", b"3"][: 3 if shares else 2]


def test_one_that_a_signal_handler_opened_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening: Callable[..., anabranch.Router] = held_routers.open_router  # type: ignore[attr-defined]
    opened = list[anabranch.Router]()

    def struck(*given: Any, **options: Any) -> anabranch.Router:
        monkeypatch.setattr(held_routers, "open_router", opening)
        opened.append(anabranch.shared(config(tmp_path)))
        return opening(*given, **options)

    monkeypatch.setattr(held_routers, "open_router", struck)
    with pytest.raises(StoreLockedError):
        anabranch.shared(config(tmp_path))
    with opened[0], anabranch.shared(config(tmp_path)) as router:
        assert router is opened[0]
