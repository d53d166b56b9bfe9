"""Retries and the budget: when to try again, and how many failures to park before something else must be wrong."""

from __future__ import annotations

import json
import random
import time
from bisect import insort
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.errors import ConfigError
from checkpoint.head import Head, Spent
from deadletter import Budget, ErrorClass, Kind, Retry
from deadletter.policy import LONGEST_WINDOW, WATCHED, BudgetLimits, Used, from_json, lift_budget, to_json

SMALL = BudgetLimits(((4, 0.5), (10, 0.3), (1, 1.0)))


class Passing(Exception):
    """Transient in these tests."""


def class_of(error: BaseException) -> ErrorClass:
    """Only Passing will pass."""
    return ErrorClass.TRANSIENT if isinstance(error, Passing) else ErrorClass.PERMANENT


class Times:
    """A clock that only sleeping moves, and a function that fails some times before it answers."""

    def __init__(self, *errors: BaseException) -> None:
        self.now, self.runs, self.waits, self.told, self.errors = 100.0, 0, list[float](), list[tuple[int, BaseException, float]](), errors

    def sleep(self, seconds: float) -> None:
        self.waits.append(float(seconds))
        self.now += seconds

    def run(self) -> str:
        self.runs += 1
        if self.runs <= len(self.errors):
            raise self.errors[self.runs - 1]
        return "done"

    def under(self, retry: Retry, deadline: float | None = None) -> str:
        def tell(number: int, error: BaseException, wait: float) -> None:
            self.told.append((number, error, wait))

        return str(retry.retrying(class_of, tell, deadline, sleep=self.sleep, clock=lambda: self.now)(self.run))


def test_a_transient_error_is_tried_again_until_it_passes() -> None:
    """The result is the function's; each failed attempt is told with its number, error and the wait that follows."""
    errors = Passing("a"), Passing("b")
    times = Times(*errors)
    assert times.under(Retry()) == "done"
    assert [(number, error) for number, error, _ in times.told] == [(1, errors[0]), (2, errors[1])]
    assert [wait for _, _, wait in times.told] == times.waits


def test_the_last_error_is_raised_after_the_last_attempt() -> None:
    """`attempts` counts runs, and what is raised is the function's own error, not one about retrying."""
    errors = [Passing(str(i)) for i in range(9)]
    times = Times(*errors)
    with pytest.raises(Passing) as raised:
        times.under(Retry(attempts=4))
    assert raised.value is errors[3]
    assert (times.runs, len(times.waits)) == (4, 3)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_what_will_not_pass_is_raised_at_once(error: BaseException) -> None:
    """Neither an event's own fault nor the end of the process is tried again."""
    times = Times(error)
    with pytest.raises(type(error)) as raised:
        times.under(Retry())
    assert raised.value is error
    assert (times.runs, times.waits, times.told) == (1, [], [])


def test_the_end_of_the_process_is_not_asked_for_its_class() -> None:
    """A rule of the user's that calls everything transient cannot keep Ctrl-C from working."""
    times = Times(KeyboardInterrupt())
    retrying = Retry().retrying(lambda error: ErrorClass.TRANSIENT, lambda *told: None, sleep=times.sleep)
    with pytest.raises(KeyboardInterrupt):
        retrying(times.run)
    assert times.runs == 1


def test_once_more_there_is_time_for_what_asks_for_it() -> None:
    """A run that took longer than all retries may is tried once more where its error asks for that, whichever run it was, and not twice."""
    retry = Retry(total=0.0)
    with pytest.raises(Passing):
        Times(Passing("it took long")).under(retry)
    times = Times(Passing("killed"), Passing("killed"), Passing("killed"))
    retrying = retry.retrying(class_of, lambda *told: None, None, lambda error: "killed" in str(error), times.sleep, lambda: times.now)
    with pytest.raises(Passing):
        retrying(times.run)
    assert times.runs == 2
    later = Times(Passing("locked"), Passing("killed"), Passing("killed"))

    def slower_each_time() -> str:
        later.now += 20 * later.runs
        return later.run()

    retrying = Retry(total=10.0).retrying(
        class_of, lambda *told: None, None, lambda error: "killed" in str(error), later.sleep, lambda: later.now
    )
    with pytest.raises(Passing):
        retrying(slower_each_time)
    assert later.runs == 3


def test_one_attempt_means_no_retry() -> None:
    """Retries can be switched off."""
    times = Times(Passing())
    with pytest.raises(Passing):
        times.under(Retry(attempts=1))
    assert times.waits == []


def test_waits_double_are_capped_and_spread_over_the_whole_range() -> None:
    """Full jitter: the nth wait is anywhere from 0 to first * 2^(n-1), never above `longest`."""
    random.seed(7)
    waits = []
    for _ in range(400):
        times = Times(*[Passing()] * 6)
        times.under(Retry(attempts=7, first=1.0, longest=5.0, total=1000.0))
        waits.append(times.waits)
    highs = np.array([1.0, 2.0, 4.0, 5.0, 5.0, 5.0])
    seen = np.array(waits)
    assert (seen >= 0).all()
    assert (seen <= highs).all()
    assert (seen.max(axis=0) > 0.95 * highs).all()
    assert (seen.min(axis=0) < 0.05 * highs).all()


def test_no_wait_ends_after_the_deadline() -> None:
    """A chunk shares one deadline: an attempt whose wait would pass it is the last one."""
    random.seed(7)
    for _ in range(200):
        times = Times(*[Passing()] * 50)
        with pytest.raises(Passing):
            times.under(Retry(attempts=50, first=1.0, longest=4.0, total=1000.0), deadline=109.0)
        assert times.now <= 109.0
        assert 1 < times.runs < 50


def test_without_a_deadline_the_total_holds_from_now() -> None:
    """`total` seconds bound the retries also where the caller names no deadline."""
    times = Times(*[Passing()] * 50)
    with pytest.raises(Passing):
        times.under(Retry(attempts=50, first=2.0, longest=2.0, total=6.0))
    assert times.now <= 106.0


def test_a_deadline_that_has_passed_leaves_one_attempt() -> None:
    """Whatever happened before, each part of a chunk is run once."""
    times = Times(Passing(), Passing())
    with pytest.raises(Passing):
        times.under(Retry(first=0.1), deadline=99.0)
    assert times.runs == 1


@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"first": -1.0}, {"first": 9.0}, {"longest": float("inf")}, {"total": -1.0}, {"total": float("nan")}],
    ids=str,
)
def test_a_retry_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    """The mistake is named where it is made."""
    with pytest.raises(ConfigError, match=r"Retry"):
        Retry(**wrong)


def naive_excess(budget: BudgetLimits, failures: set[int], chunk: range, lifted: int) -> set[tuple[int, int, int, int]]:
    """(end, N, failed, allowed) of each window over its limit that ends in the chunk and holds a failure of it, counted one by one."""
    found = set()
    for size, share in budget.shares:
        allowed = round(size * share * 1000) // 1000
        for end in chunk:
            window = range(end - size + 1, end + 1)
            failed = [value for value in window if value in failures and value > lifted]
            if window[0] >= 1 and len(failed) > allowed and any(value in chunk for value in failed):
                found.add((end, size, len(failed), allowed))
    return found


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, list[int], range, int]:
    """The clock before a chunk, failures of history and chunk, the chunk, and up to where failures are admitted."""
    decided = draw(st.integers(0, 30))
    chunk = range(decided + 1, decided + 1 + draw(st.integers(1, 30)))
    failures = sorted(draw(st.sets(st.integers(1, chunk.stop - 1), max_size=40)))
    return decided, failures, chunk, draw(st.one_of(st.just(0), st.integers(0, chunk.stop + 5)))


@given(situations())
def test_excess_is_what_counting_each_window_finds(situation: tuple[int, list[int], range, int]) -> None:
    """The first window over its limit is found exactly, and none is where there is none."""
    decided, failures, chunk, lifted = situation
    expected = naive_excess(SMALL, set(failures), chunk, lifted)
    found = SMALL.excess(decided, failures, chunk, lifted)
    assert (found is None) == (not expected)
    if found:
        first = min(end for end, *_ in expected)
        assert (first, *found) in expected


@given(situations(), st.randoms(use_true_random=False))
def test_what_is_surely_exceeded_stays_so(situation: tuple[int, list[int], range, int], order: random.Random) -> None:
    """The early answer is right in whatever order failures are found, and it comes with the failure that makes it so."""
    decided, failures, chunk, lifted = situation
    known = [value for value in failures if value <= decided]
    fresh = [value for value in failures if value > decided]
    order.shuffle(fresh)
    for value in fresh:
        insort(known, value)
        surely = SMALL.surely_exceeded(known, chunk, lifted, newest=value)
        assert surely == (SMALL.excess(decided, known, chunk, lifted) is not None)
        if surely:
            assert SMALL.excess(decided, failures, chunk, lifted)
            return


@given(situations())
def test_failures_in_order_need_no_newest(situation: tuple[int, list[int], range, int]) -> None:
    """The greatest failure is taken for the newest one."""
    decided, failures, chunk, lifted = situation
    for count in range(1, len(failures) + 1):
        known = failures[:count]
        if known[-1] > decided and SMALL.surely_exceeded(known, chunk, lifted):
            assert SMALL.excess(decided, failures, chunk, lifted)


@given(st.lists(st.booleans(), max_size=120), st.integers(1, 17))
def test_what_is_kept_is_enough_to_judge_later_chunks(fails: list[bool], size: int) -> None:
    """Chunk by chunk with the kept history, a stream is stopped in the same chunk as with the whole history."""
    kept: tuple[int, ...] = ()
    everything: list[int] = []
    for start in range(0, len(fails), size):
        chunk = range(start + 1, min(start + size, len(fails)) + 1)
        fresh = [value for value in chunk if fails[value - 1]]
        everything += fresh
        assert SMALL.excess(start, [*kept, *fresh], chunk, 0) == SMALL.excess(start, everything, chunk, 0)
        kept = SMALL.kept([*kept, *fresh], chunk.stop - 1)
        assert len(kept) < 10


@pytest.mark.parametrize("failures", [range(400, 436), range(400, 450), range(7, 5_000, 20)], ids=["36 of 100", "50 of 100", "5 percent"])
def test_the_default_admits_natural_badness(failures: range) -> None:
    """36 bad of any 100 in a burst, and 5 % for ever, are bad events and not an outage."""
    assert BudgetLimits().excess(0, list(failures), range(1, 5_001), 0) is None


@pytest.mark.parametrize("failures", [range(1, 52), range(300, 351), range(3, 5_000, 9)], ids=["start", "burst", "eleven percent"])
def test_the_default_holds_back_an_outage(failures: range) -> None:
    """More than half of 100 in a row, or more than a tenth of 1,000, is not parked."""
    assert BudgetLimits().excess(0, list(failures), range(1, 5_001), 0)


def test_a_quiet_topic_goes_on_behind_its_poison_event() -> None:
    """Batches of one event: a single failure among a hundred, even the very first event ever, stops nothing."""
    kept: tuple[int, ...] = ()
    for decided in range(500):
        fresh = [decided + 1] if decided % 100 == 0 else []
        assert BudgetLimits().excess(decided, [*kept, *fresh], range(decided + 1, decided + 2), 0) is None
        kept = BudgetLimits().kept([*kept, *fresh], decided + 1)


def test_below_a_full_window_everything_is_admitted() -> None:
    """99 failures of the first 99 events are parked; the hundredth makes a window."""
    assert BudgetLimits().excess(0, list(range(1, 100)), range(1, 100), 0) is None
    assert not BudgetLimits().surely_exceeded(list(range(1, 100)), range(1, 100), 0)
    assert BudgetLimits().surely_exceeded(list(range(1, 52)), range(1, 101), 0)
    assert BudgetLimits().excess(99, list(range(1, 101)), range(100, 101), 0) == (100, 100, 50)


def test_a_lifted_budget_admits_a_known_flood_and_no_more() -> None:
    """Failures up to the lifted value do not count; those behind it do, again from nothing."""
    flood = list(range(1, 2_001))
    assert BudgetLimits().excess(0, flood, range(1, 2_001), 2_000) is None
    assert BudgetLimits().excess(0, flood, range(1, 2_001), 1_949) == (100, 51, 50)
    assert BudgetLimits().excess(0, flood, range(1, 2_001), 1_950) is None
    assert not BudgetLimits().surely_exceeded(flood, range(1, 2_001), 2_000)


def test_what_is_past_never_stops_a_chunk_without_failures() -> None:
    """Limits that were lowered judge from the next failure on."""
    history = list(range(1, 200))
    assert BudgetLimits().excess(199, history, range(200, 300), 0) is None
    assert BudgetLimits().excess(199, [*history, 200], range(200, 300), 0) == (100, 100, 50)


def test_shares_are_exact() -> None:
    """29 % of 100 are 29, although 0.29 * 100 is below that in floating point."""
    budget = BudgetLimits(((100, 0.29),))
    assert budget.excess(0, list(range(1, 30)), range(1, 101), 0) is None
    assert budget.excess(0, list(range(1, 31)), range(1, 101), 0) == (100, 30, 29)


def test_a_flood_of_fifty_thousand_is_judged_at_once() -> None:
    """Cheap: one pass over a full chunk, and each early answer is a few bisections."""
    failures, chunk = list(range(1, 50_001)), range(1, 50_001)
    begun = time.perf_counter()
    assert BudgetLimits().excess(0, failures, chunk, 0)
    assert time.perf_counter() - begun < 5
    begun = time.perf_counter()
    for count in range(1, 50_001, 50):
        BudgetLimits().surely_exceeded(failures, chunk, 0, newest=count)
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize("limits", [((0, 0.5),), ((100, 1.5),), ((100, -0.1),), ((10_001, 0.5),)])
def test_a_budget_that_makes_no_sense_is_refused(limits: tuple[tuple[int, float], ...]) -> None:
    """The mistake is named where it is made."""
    with pytest.raises(ConfigError, match=r"Limits\.shares"):
        BudgetLimits(limits)
    for kind in WATCHED:
        with pytest.raises(ConfigError, match=rf"Budget\.{kind.lower()}"):
            Budget(**{kind.lower(): limits})


def test_a_budget_without_limits_admits_everything_and_keeps_nothing() -> None:
    """No limit is a limit that never holds."""
    assert BudgetLimits(()).excess(0, [1, 2], range(1, 3), 0) is None
    assert BudgetLimits(()).kept([1, 2], 2) == ()


def test_kinds_have_budgets_of_their_own() -> None:
    """What cannot be decoded or keyed and what the handler cannot do is limited by default, what it rejects is not; each may be set."""
    flood = {kind: Used(100, range(1, 100), "t/0 7: why") for kind in WATCHED}
    over = {kind: Budget().excess({}, {kind: used}) for kind, used in flood.items()}
    assert {kind for kind, excess in over.items() if excess is None} == {Kind.REJECTED}
    assert all((x.kind, x.window, x.failed, x.allowed, x.example) == (kind, 100, 99, 50, "t/0 7: why") for kind, x in over.items() if x)
    for kind in WATCHED:
        assert Budget(**{kind.lower(): ()}).excess({}, {kind: flood[kind]}) is None
        assert Budget(**{kind.lower(): ((10, 0.3),)}).excess({}, {kind: Used(10, range(1, 5))})
    assert Budget().excess({Kind.NO_KEY: Spent(0, (), 100)}, {Kind.UNDECODABLE: flood[Kind.UNDECODABLE]}), "lifted for another kind"
    assert Budget().excess({Kind.UNDECODABLE: Spent(0, (), 100)}, {Kind.UNDECODABLE: flood[Kind.UNDECODABLE]}) is None


@pytest.mark.full
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), max_size=30), st.randoms(use_true_random=False))
def test_the_history_of_a_kind_is_bounded_and_survives_being_stored(chunks: list[tuple[int, float]], chance: random.Random) -> None:
    """Chunk by chunk what is kept is at most a window long, and admits or refuses the next chunk as the whole history does."""
    budget, kind = Budget(undecodable=SMALL.shares), Kind.UNDECODABLE
    spent: dict[Kind, Spent] = {}
    whole: list[int] = []
    for size, share in chunks:
        used = Used(size, [n for n in range(1, size + 1) if chance.random() < share])
        decided = spent.get(kind, Spent()).decided
        everything = {kind: Spent(decided, tuple(whole))}
        assert budget.excess(spent, {kind: used}) == budget.excess(everything, {kind: used})
        whole += [decided + n for n in used.failed]
        spent = from_json(json.loads(json.dumps(to_json(budget.spend(spent, {kind: used})))))
        assert spent[kind].decided == decided + size and len(spent[kind].failures) < 10


@given(st.lists(st.lists(st.sampled_from(["passed", "late", "bad"]), min_size=1, max_size=6), max_size=10))
def test_time_outs_in_a_row_are_counted_over_chunks(chunks: list[list[str]]) -> None:
    """From the last event that passed on, without those that failed in another way, and through what a store keeps."""
    spent: dict[Kind, Spent] = {}
    for chunk in chunks:
        behind = chunk[len(chunk) - chunk[::-1].index("passed") :] if "passed" in chunk else chunk
        failed = [n for n, became in enumerate(chunk, 1) if became != "passed"]
        used = Used(len(chunk), failed, "", behind.count("late"), "passed" in chunk)
        spent = from_json(json.loads(json.dumps(to_json(Budget().spend(spent, {Kind.HANDLER_ERROR: used})))))
    all_of_them = [became for chunk in chunks for became in chunk]
    passed = max((n for n, became in enumerate(all_of_them, 1) if became == "passed"), default=0)
    assert spent.get(Kind.HANDLER_ERROR, Spent()).out_of_time == all_of_them[passed:].count("late")


def test_a_row_of_time_outs_is_kept_until_a_person_lifts_the_budget() -> None:
    """Without time-outs the document says nothing of them, as one of before there was such a row; both are read."""
    kind, late = Kind.HANDLER_ERROR, Spent(20, (19, 20), 0, 2)
    plain = {"decided": 20, "failures": [19, 20], "lifted": 0}
    assert json.loads(json.dumps(to_json({kind: replace(late, out_of_time=0)}))) == {kind: plain}
    assert from_json({kind: plain}) == {kind: replace(late, out_of_time=0)}
    assert from_json(json.loads(json.dumps(to_json({kind: late})))) == {kind: late}
    assert lift_budget(Head("c", spent={kind: late}), 5, kind).spent[kind] == Spent(20, (19, 20), 25)


def test_an_admitted_flood_leaves_nothing_in_the_history() -> None:
    """Failures that do not count are not kept, however many there are; of a kind without a limit nothing is."""
    used = Used(LONGEST_WINDOW, range(1, LONGEST_WINDOW + 1))
    assert Budget().spend({Kind.NO_KEY: Spent(lifted=20_000)}, {Kind.NO_KEY: used})[Kind.NO_KEY] == Spent(LONGEST_WINDOW, (), 20_000)
    assert Budget().spend({}, {Kind.REJECTED: used})[Kind.REJECTED] == Spent(LONGEST_WINDOW)
