"""`Router.repartition` while messages are sent and acked: every call of it is spoiled, and every power failure.

    python -m tests.crash.moving_live --kind crash        the process ends before call number k
    python -m tests.crash.moving_live --kind power        every directory that a disk may hold at any point

What moving.py does to a directory that nobody uses. Here a router has it open, and each time that it tells of progress
something is done to what moves: a script, so that call number k is the same in every run, and what is there after each
step is known from a run without faults. Whatever happens, what is there is that of a step that was done, or under way;
`anabranch repartition` finishes it; and where only an error came, the router goes on with all of it.
"""

from __future__ import annotations

import gc
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import anabranch
from anabranch.policies.errors import AnabranchError, PlacementError
from anabranch.router.offline.repartition import repartition
from anabranch.router.placement.on_disk.repartition_progress import NAME

from ..places import in_memory
from .calls import Faults, Jobs, simulated
from .disk import Recorder, State
from .ledger import violations
from .moving import Facts, after, before, distinct, facts_of, fill, small_pages, spoiled
from .spoiling import POWER, Campaign, of_arguments, parser, without_power

SCRIPT: Final = (
    "send a", "ack a", "ack t", "send b", "send t", "commit", "hold", "send a", "ack held", "send new", "ack t",
    "ack held",
)  # fmt: skip
"""Steps, which are done again from the first on."""
AT_ONCE: Final = 2
"""Steps each time that progress is told."""


class Script:
    """What is done to a router while it moves, and what it shows after each step."""

    def __init__(self, router: anabranch.Router, shows: Callable[[], Facts]) -> None:
        self._router, self._shows = router, shows
        self._held: list[anabranch.Message] = []
        self.step = 0
        self.under_way = False
        self.facts = [shows()]
        self.times: list[tuple[int, int]] = []
        self.now: Callable[[], int] = lambda: 0

    def told(self, done: int, total: int) -> None:
        """The next steps, after which no other comes if one fails."""
        for _ in range(AT_ONCE):
            if self.under_way:
                return
            self.under_way = True
            begun = self.now()
            self._do(SCRIPT[self.step % len(SCRIPT)])
            self.times.append((begun, self.now()))
            self.step += 1
            self.facts.append(self._shows())
            self.under_way = False

    def _do(self, what: str) -> None:
        router, body = self._router, b"live %d" % self.step
        verb, _, name = what.partition(" ")
        if verb == "send" and name == "t":
            router.topic("t").send(body)
        elif verb == "send":
            router.queue(name).send(body, message_id=f"live-{self.step}")
        elif verb == "commit":
            message = router.queue("a").receive()
            with router.transaction() as transaction:
                if message is not None:
                    transaction.ack(message)
                transaction.send("b", body)
                transaction.send("a", body)
        elif verb == "hold":
            self._held += [m for m in (router.queue("a").receive(), router.queue("b").receive()) if m is not None]
        elif name == "held":
            if self._held:
                self._held.pop().ack()
        else:
            source = router.topic("t").subscriptions()[0] if name == "t" else router.queue(name)
            message = source.receive()
            if message is not None:
                message.ack()


def plain(facts: Facts) -> Facts:
    """Without the time at which something was sent, and how often it was given back."""
    return {name: [(m[0], m[1], m[2], m[5]) for m in messages] for name, messages in facts.items() if messages}


def shown(settings: anabranch.Config, allowed: Sequence[Facts]) -> list[str]:
    """What a router shows, if it opens."""
    try:
        with anabranch.open(settings) as router:
            if (found := plain(facts_of(router))) not in allowed:
                return [f"{[s.name for s in settings.stores]} show {found}, not {allowed[0]}"]
            return violations(router)
    except PlacementError:
        return []


def finished(directory: Path, allowed: Sequence[Facts]) -> list[str]:
    """What is wrong with what was left, and with what `anabranch repartition` makes of it."""
    wrong = shown(before(directory), allowed) + shown(after(directory), allowed)
    repartition(after(directory), before(directory))
    with anabranch.open(after(directory)) as router:
        if (found := plain(facts_of(router))) not in allowed:
            wrong.append(f"found {found}, not {allowed[0]}")
        for name, identity in ("a", "a-0"), ("a", "a-9"), ("b", "b-0"):
            if not router.queue(name).send(b"", message_id=identity).duplicate:
                wrong.append(f"the duplicate window of {name} has lost {identity}")
        wrong += violations(router)
    stores = {path.name for path in (directory / "stores").iterdir()}
    if stores - {"all"} != {"a", "rest", "topics"} or (directory / NAME).exists():
        wrong.append(f"there are the stores {stores}")
    return wrong


class Run:
    """One run of the script, of which a call may be spoiled."""

    def __init__(self, directory: Path, faults: Faults) -> None:
        self.directory, self._faults = directory, faults
        self.script: Script | None = None
        self.wrong: list[str] = []

    def _shows(self, router: anabranch.Router) -> Facts:
        on, self._faults.on = self._faults.on, False
        try:
            return plain(facts_of(router))
        finally:
            self._faults.on = on

    def run(self, known: Sequence[Facts] = (), now: Callable[[], int] = lambda: 0) -> None:
        """`known`: what a run without faults has shown."""
        router = anabranch.open(before(self.directory))
        self.script = script = Script(router, lambda: self._shows(router))
        script.now = now
        try:
            router.repartition(after(self.directory), script.told)
        except AnabranchError:
            if not self._faults.kind:
                raise
            self._goes_on(router, known)
        try:
            router.close()
        except AnabranchError:
            if not self._faults.kind:
                raise

    def _goes_on(self, router: anabranch.Router, known: Sequence[Facts]) -> None:
        """After an error all is in use, but what is in a store that has failed."""
        self._faults.on = False
        try:
            if any(store.failed for store in router.stats().stores.values()):
                return
        except AnabranchError:  # the error came while a store was removed: that one does not open
            return
        try:
            found = plain(facts_of(router))
        except AnabranchError as error:
            self.wrong.append(f"after an error: {type(error).__name__}: {error}")
            return
        if found not in self.allowed(known):
            self.wrong.append(f"after an error it shows {found}, not {self.allowed(known)[0]}")

    def allowed(self, known: Sequence[Facts]) -> list[Facts]:
        """What may be there now."""
        if self.script is None:
            return list(known[:1])
        return list(known[self.script.step : self.script.step + 1 + self.script.under_way])


def trial(base: Path, template: Path, known: Sequence[Facts], kind: str, at: int) -> tuple[Faults, Run, list[str]]:
    """Move with call number `at` spoilt; what is wrong."""
    faults = Faults(base, kind, at)
    run = Run(base / "data", faults)

    def look(directory: Path) -> list[str]:
        allowed = run.allowed(known) if known else run.script.facts[-1:] if run.script else []
        return finished(directory, allowed)

    wrong = spoiled(base, template, faults, partial(run.run, known), look)
    return faults, run, [f"{kind} at {at}, {faults.hit}: {line}" for line in run.wrong] + wrong


def power(base: Path, campaign: Campaign) -> None:
    """Every state of the disk from the first call of the move on."""
    directory = base / "data"
    recorder, jobs = Recorder(base), Jobs()
    faults = Faults(base, watch=recorder.watch)
    run = Run(directory, faults)
    with simulated(jobs, "power"), small_pages(), faults.patched():
        fill(directory, prepared=False)
        begin = recorder.now()
        run.run(now=recorder.now)
        faults.dead = True
    gc.collect()
    shutil.rmtree(directory)
    assert run.script is not None
    script = run.script
    found = distinct(recorder, begin)

    def look(state: State) -> list[str]:
        done = sum(end <= state.point for _, end in script.times)
        begun = max(done, sum(start < state.point for start, _ in script.times))
        allowed = script.facts[done : begun + 1]
        return without_power(
            base, recorder, state, small_pages, lambda directory, jobs: finished(directory, allowed) + jobs.raised
        )

    checked = campaign.lose_power(found, look)
    points = recorder.now() - begin
    campaign.report(f"power: {points} points, {len(found)} distinct states, {checked} checked, {campaign.bad} wrong")


def spoil(campaign: Campaign) -> int:
    """Every call, every kind, or a share of them; how many trials went wrong."""
    with tempfile.TemporaryDirectory(prefix="moving-live-", dir=in_memory()) as place:
        base = Path(place)
        template = base / "template" / "data"
        fill(template, prepared=False)
        gc.collect()
        gc.freeze()  # each trial collects what it made, and nothing else
        faults, run, wrong = trial(base, template, (), "", 0)
        assert run.script is not None
        known = run.script.facts
        campaign.name = f"{run.script.step} steps, "
        campaign.begin(faults.log, wrong)
        campaign.spoil(faults.log, lambda kind, at: trial(base, template, known, kind, at)[2], base)
        if POWER in campaign.kinds:
            power(base, campaign)
    return campaign.bad


def main() -> int:
    logging.disable()  # records would hold stores and their files
    given = parser("Spoil every call of a repartition of an open router.", POWER).parse_args()
    return 1 if spoil(of_arguments(given, POWER)) else 0


if __name__ == "__main__":
    sys.exit(main())
