"""What a schedule's moves do to a world, by the name of the deed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoint.errors import StoreUnavailable
from simulation import clock
from simulation.instances import Crash, Instance
from simulation.schedule import Move

if TYPE_CHECKING:
    from simulation.shared import Shared
    from simulation.world import World

INSTANCES = 5
"""At once, at most."""

ASK_NOBODY = ("start", "plan", "finish", "receive")
"""Steps that do not ask the store: no call can fail there."""


def do(world: World, move: Move) -> None:
    """One move, to the instance whose turn it is."""
    instance = world.awake()
    if world.tell is not None:
        world.tell(f"turn {world.tick}: {move.deed} {move.number}" + (f" at {instance}, before {instance.at}" if instance else ""))
    _BY_NAME[move.deed](world, instance, move.number)


def _switch(world: World, _instance: Instance | None, number: int) -> None:
    if world.instances:
        world.current = world.instances[number % len(world.instances)]
        world.current.asleep = 0


def _start(world: World, _instance: Instance | None, _number: int) -> None:
    if len(world.instances) < INSTANCES:
        world.start()


def _crash(world: World, instance: Instance | None, _number: int) -> None:
    world.crashes += 1
    world.turn(instance, Crash())


def _fail(world: World, instance: Instance | None, _number: int) -> None:
    if instance is not None and instance.at not in ASK_NOBODY:
        world.turn(instance, StoreUnavailable())


def _sleep(world: World, instance: Instance | None, number: int) -> None:
    if instance is not None:
        instance.asleep = world.tick + number


def _person(world: World, _instance: Instance | None, _number: int) -> None:
    if world.shared.letters and len(world.instances) < INSTANCES:
        world.go("person", world.person)


def _reset(world: World, _instance: Instance | None, number: int) -> None:
    world.new_checkpoint(at_ours=number % 2 == 0)
    world.start()


def _clock(_world: World, _instance: Instance | None, number: int) -> None:
    clock.jump(number)


def _restore(world: World, _instance: Instance | None, number: int) -> None:
    if (backup := _backup(world, number)) is not None:
        world.shared.restore(backup)
        _taken_back(world)


def _copy_state(world: World, instance: Instance | None, number: int) -> None:
    if not world.schedule.ledger:
        return _restore(world, instance, number)
    if (backup := _backup(world, number)) is not None:
        world.shared.copy_back(backup)
        _taken_back(world)
    return None


def _sink(world: World, _instance: Instance | None, number: int) -> None:
    backups = world.shared.backups
    if backups and world.schedule.ledger and not world.shared.ahead:
        world.shared.copy_sink_back(backups[-1 - number % min(4, len(backups))])


def _backup(world: World, number: int) -> Shared | None:
    """One of the last ones; those after it are of a time that is lost."""
    backups = world.shared.backups
    if not backups:
        return None
    del backups[max(1, len(backups) - number % 4) :]
    return backups[-1]


def _taken_back(world: World) -> None:
    world.taken_back = True
    world.note_ahead()
    _start_anew(world)


def _start_anew(world: World) -> None:
    """As documented: whoever restores tables starts a new query anew that begins late in partitions that they do not know."""
    known = {point.partition for point in world.shared.head.checkpoints}
    passed = [(c, {at for at in c.passed if at[0] not in known}) for c in world.checkpoints if not c.finished]
    lost = [checkpoint for checkpoint, places in passed if places - world.shared.seen]
    world.stop(lost)
    if world.checkpoints[-1] in lost:
        world.new_checkpoint(at_ours=True)


_BY_NAME = {
    "switch": _switch,
    "start": _start,
    "crash": _crash,
    "fail": _fail,
    "sleep": _sleep,
    "person": _person,
    "reset": _reset,
    "restore": _restore,
    "copy": _copy_state,
    "sink": _sink,
    "clock": _clock,
}
