"""`anabranch transactions`: what waits for an outcome, and outcomes given by hand."""

from __future__ import annotations

from typing import Any

import click

from ...policies.config import Config
from ...policies.errors import TransactionError
from ..router import Router, inspection_of
from ..transactions.outcomes import Heuristic, InDoubt
from ..transactions.states import Outcome
from .directory import on_directory, opened
from .output import echo_json, echo_result, json_option


@click.command()
@on_directory()
@click.option("--commit", "commit", metavar="ID", help="Decide by hand: this one is committed.")
@click.option("--rollback", "rollback", metavar="ID", help="Decide by hand: this one is rolled back.")
@click.option("--forget", "forget", metavar="ID", help="Drop the record of an outcome that was given by hand.")
@json_option
@click.pass_context
def transactions_command(
    ctx: click.Context, config: Config, commit: str | None, rollback: str | None, forget: str | None, as_json: bool
) -> None:
    """List transactions that wait for an outcome, or give one.

    ID is a transaction's id or its xid, as they are listed. Opening resolves what is decided, and what nobody can have
    committed. Each transaction that is left waits for one of three things: a transaction manager that has not said the
    outcome, a store that cannot be used, or a decision log that is lost. Ask there before you decide. An outcome by
    hand is never taken back. It is kept until --forget, so that the manager can find it.

    The exit code is 1 also where the decision log is damaged.

    \b
    Example:
      anabranch transactions data
      anabranch transactions data --commit 1:order-17:messages
      anabranch transactions -c stores.yaml --forget 1:order-17:messages --json
    """
    if sum(given is not None for given in (commit, rollback, forget)) > 1:
        raise click.UsageError("--commit, --rollback and --forget exclude each other; give one, for one transaction")
    with opened(config, quiet=True) as router:  # what is wrong is told below
        if forget is not None:
            done = _forget(router, forget)
        elif commit is not None:
            done = _decide(router, commit, "commit")
        elif rollback is not None:
            done = _decide(router, rollback, "rollback")
        else:
            _list(ctx, router, as_json)
            return
    text = "forgotten"
    if "outcome" in done:
        waits = f"; to be carried out yet in {', '.join(done['waits_for'])}" if done["waits_for"] else ""
        text = f"{done['outcome']}, by hand{waits}"
    echo_result(as_json, done, f"{done['transaction']}: {text}")


def _list(ctx: click.Context, router: Router, as_json: bool) -> None:
    waiting, by_hand, damage = router.in_doubt(), router.heuristics(), inspection_of(router).decisions_damage
    if as_json:
        echo_json(
            {
                "directory": str(router.config.directory),
                "decision_log": str(damage) if damage is not None else "ok",
                "in_doubt": [
                    _row(one) | {"stores": list(one.stores), "sends": one.sends, "acks": one.acks, "reason": one.reason}
                    for one in waiting
                ],
                "by_hand": [_row(one) for one in by_hand],
            }
        )
    else:
        _print(router, waiting, by_hand)
    if damage is not None:
        click.echo(f"Error: the decision log cannot be used: {damage}", err=True)
        ctx.exit(1)


def _row(one: InDoubt | Heuristic) -> dict[str, Any]:
    return {
        "transaction": one.transaction,
        "xid": one.xid._asdict() if one.xid is not None else None,
        "outcome": one.outcome,
    }


def _print(router: Router, waiting: list[InDoubt], by_hand: list[Heuristic]) -> None:
    if not waiting:
        click.echo(f"No transaction of {router.config.directory} waits for an outcome.")
    for one in waiting:
        click.echo(one.transaction)
        if one.xid is not None:
            click.echo(f"  xid      {one.xid}")
        click.echo(f"  stores   {', '.join(one.stores) or 'none of those that can be opened'}")
        click.echo(f"  holds    sends: {one.sends:,}, acks: {one.acks:,}")
        click.echo(f"  outcome  {one.outcome or 'none yet'}")
        click.echo(f"  waits    {one.reason}")
    if by_hand:
        click.echo("Outcomes given by hand, kept until --forget:")
    for known in by_hand:
        name = f"  ({known.xid})" if known.xid is not None else ""
        click.echo(f"  {known.transaction}  {known.outcome}{name}")


def _decide(router: Router, text: str, outcome: Outcome) -> dict[str, Any]:
    waiting = router.in_doubt()
    for one in router.heuristics():
        if text in (one.transaction, str(one.xid)) and not any(text == str(other.xid) for other in waiting):
            raise TransactionError(f"the outcome of {text!r} was given by hand already: {one.outcome}")
    transaction = _named(text, waiting)
    router.resolve(transaction, outcome)
    left = [one for one in router.in_doubt() if one.transaction == transaction]
    return {
        "transaction": transaction,
        "outcome": outcome,
        "waits_for": [store for one in left for store in one.stores],
    }


def _forget(router: Router, text: str) -> dict[str, Any]:
    transaction = _named(text, router.heuristics())
    router.forget(transaction)
    return {"transaction": transaction, "forgotten": True}


def _named(text: str, known: list[InDoubt] | list[Heuristic]) -> str:
    """Return the id of the transaction that is called so, by its id or by its xid."""
    found = [one.transaction for one in known if text in (one.transaction, str(one.xid))]
    if len(found) > 1:  # 1:a:b: is (1, "a:b", "") and (1, "a", "b:")
        raise TransactionError(f"{text!r} names several of these transactions; give the id: {', '.join(found)}")
    if found:
        return found[0]
    names = ", ".join(str(one.xid or one.transaction) for one in known[:10])
    raise TransactionError(f"{text!r} names none of these transactions; there are: {names or 'none'}")
