"""Properties that hold for whatever comes: lines, answers, timers, outbox, pool; each against a model of it."""
import collections
import math
import re

import pepsidispatch as m
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_decisions import Stage


@pytest.fixture(autouse=True)
def nothing_left():
    """Nothing is opened or started here: spare the search for leaks."""


# A long line is rare in random bytes: make it likely.
pieces = st.one_of(st.binary(max_size=30),
                   st.sampled_from([b'\n', b'0\n', b'\n\n', b'x' * 8191, b'x' * 8192, b'x' * 8193]))
outputs = st.lists(pieces, max_size=8).map(b''.join)


def frame(chunks):
    """Feed chunks as a worker's read would: nothing more after an overlong line."""
    framing, lines = m.Framing(), []
    for chunk in chunks:
        more, overlong = framing.feed(chunk)
        lines += more
        if overlong is not None:
            return lines, True
    return lines, False


@given(outputs, st.lists(st.integers(1, 5000), max_size=20))
def test_any_bytes_in_any_chunks_give_the_same_lines(data, sizes):
    chunks, rest = [], data
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    chunks.append(rest)
    lines, overlong = frame(chunks)
    expected = data.split(b'\n')[:-1]
    too_long = [i for i, line in enumerate(data.split(b'\n')) if len(line) > m.LINE_LIMIT]
    assert overlong == bool(too_long)
    assert lines == (expected[:too_long[0]] if too_long else expected)


# The grammar, written down a second time: after 0 only an echo and pairs, separated by blanks.
NUMBER = r'(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?'
SUCCESS = re.compile(r'0(?: id=-?[0-9]{1,19})?(?: *[^ ]+=%s)* *\Z' % NUMBER)

words = st.one_of(st.sampled_from(['id=5', 'id=', 'a=1', 'a=1.5e3', 'a=-1', 'a=nan', '=1', 'a', 'a==2', 'id=x', '1',
                                   '']),
                  st.text(max_size=5))
statuses = st.one_of(st.integers(-5, 300).map(str), st.sampled_from(['00', '+1', '1.0', '\u0661', '']))
lines = st.one_of(st.binary(max_size=60),
                  st.builds(lambda s, w, sep: (s + sep + sep.join(w)).encode('utf-8', 'surrogatepass'), statuses,
                            st.lists(words, max_size=5), st.sampled_from([' ', '  ', '\t'])))


@settings(max_examples=200)
@given(lines)
def test_an_answer_is_what_the_grammar_allows_or_a_violation(line):
    try:
        answer = m.parse_answer(line)
    except m.Violation as e:
        assert str(e).isprintable()
        return
    assert re.match(rb'(0|[1-9][0-9]{0,2})( |\Z)', line)
    assert 0 <= answer.status <= 255
    assert line.startswith(b'%d' % answer.status)
    for stage, seconds in answer.fused:
        assert stage and stage != 'id' and stage.isprintable() and 0 <= seconds < math.inf
    if answer.status == 0:
        assert answer.text == '' and SUCCESS.match(line.decode())
    if answer.id is not None:
        assert b' id=' in line


@given(st.integers(0, 255), st.one_of(st.none(), st.integers(m.FIRST_ID, m.LAST_ID)),
       st.lists(st.tuples(st.text(st.characters(blacklist_categories=('C', 'Z')), min_size=1), st.floats(0, 1e300))
                .filter(lambda pair: pair[0] != 'id'), max_size=4),
       st.text(st.characters(min_codepoint=32, max_codepoint=0xd7ff), max_size=50))
def test_what_a_correct_worker_writes_is_read_as_it_was_meant(status, ident, fused, text):
    text = 'because: ' + text if status else ''
    tokens = [str(status)] + ([] if ident is None else ['id=%d' % ident]) + ['%s=%r' % pair for pair in fused]
    tokens += [text] * bool(text)
    assert m.parse_answer(' '.join(tokens).encode()) == m.Answer(status, ident, tuple(fused), text)


@given(st.text())
def test_a_reason_is_always_fit_for_the_database(text):
    line = m.one_line(text)
    assert len(line) <= 1000 and m.one_line(line) == line
    line.encode('utf-8')
    assert not re.search('[\x00-\x1f\x7f-\x9f\u2028\u2029]', line)


@given(st.text())
def test_a_log_line_is_always_printable(text):
    assert m.printable(text).isprintable() and m.quoted(text).isprintable()
    m.printable(text).encode('utf-8')


@given(st.text(max_size=20))
def test_a_time_or_a_count_is_a_finite_value_or_refused(text):
    for parse in (m.parse_time, m.parse_count):
        try:
            assert 0 <= parse(text) < math.inf or text.strip().lower() == 'forever'
        except ValueError as e:
            assert str(e)


@given(st.text(alphabet=st.sampled_from('[]=#;%\n \tstage-pepsiPROGRAM x1\x00\ufeff"\''), max_size=80))
def test_any_text_is_a_configuration_or_a_failure(text):
    try:
        assert isinstance(m.parse_config(text, '/f'), m.Config)
    except m.Failure as e:
        assert e.code == 78 and e.lines and all(line.isprintable() for line in e.lines)


# -- timers ------------------------------------------------------------------------------------------------------------

instants = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, 7.0, math.inf])
keys = st.sampled_from(['a', 'b', ('c', 1), ('c', 2)])


class TimersMachine(RuleBasedStateMachine):
    """Against a dict that is sorted each time."""

    def __init__(self):
        super().__init__()
        self.timers = m.Timers()
        self.model = {}

    @rule(key=keys, when=instants)
    def set(self, key, when):
        self.timers.set(key, when)
        self.model[key] = when
        if when == math.inf:
            del self.model[key]

    @rule(key=keys, when=instants)
    def soonest(self, key, when):
        self.timers.soonest(key, when)
        if when < self.model.get(key, math.inf):
            self.model[key] = when

    @rule(key=keys)
    def cancel(self, key):
        self.timers.cancel(key)
        self.model.pop(key, None)

    @rule(now=instants.filter(lambda t: t < math.inf))
    def take(self, now):
        due = self.timers.take(now)
        assert sorted(map(str, due)) == sorted(str(k) for k, when in self.model.items() if when <= now)
        assert [self.model[key] for key in due] == sorted(self.model[key] for key in due)
        for key in due:
            del self.model[key]

    @rule(key=keys, number=st.integers(80, 120))
    def rearm_often(self, key, number):
        for i in range(number):
            self.timers.set(key, 10.0 + i)
        self.model[key] = 10.0 + number - 1
        assert len(self.timers._heap) <= 2 * len(self.timers) + 70

    @invariant()
    def agrees(self):
        assert self.timers.next() == min(self.model.values(), default=None)
        assert len(self.timers) == len(self.model)
        assert {key: when for when, key in self.timers.pending()} == self.model
        assert all((key in self.timers) == (key in self.model) for key in ('a', 'b', ('c', 1), ('c', 2)))


# -- outbox ------------------------------------------------------------------------------------------------------------

class OutboxMachine(RuleBasedStateMachine):
    """Against one dict of what is not confirmed; a database that confirms, refuses, or is lost."""

    def __init__(self):
        super().__init__()
        self.outbox = m.Outbox()
        self.model = {}
        self.sent = []
        self.now = 0.0
        self.number = 0

    @rule(column=st.sampled_from(['processed', 'failed', 'crashes', None]))
    def add(self, column):
        self.number = (self.number * 7 + 3) % 1009
        if self.number not in self.model:
            outcome = m.Outcome(self.number, 's', m.Row.FAILED, 'x', column=column)
            self.outbox.add(outcome)
            self.model[self.number] = outcome

    @precondition(lambda self: not self.sent)
    @rule(limit=st.integers(1, 4))
    def take(self, limit):
        self.sent = [o.id for o in self.outbox.take(limit)]
        assert self.sent == sorted(self.sent) and len(self.sent) <= limit
        assert len(self.sent) >= min(limit, len(self.model) - len(self.outbox.deferred))

    @precondition(lambda self: self.sent)
    @rule(confirmed=st.integers(0, 4))
    def reply(self, confirmed):
        for id in self.sent[:confirmed]:
            assert self.outbox.confirm(id) == self.model.pop(id)
        if self.outbox.sent:
            assert self.outbox.defer(self.now) > self.now
        self.sent = []

    @rule()
    def error(self):
        self.outbox.unsent()
        self.sent = []

    @rule()
    def lost(self):
        self.outbox.lost()
        self.sent = []
        for id, outcome in self.model.items():
            if outcome.column == 'crashes':
                self.model[id] = m.Outcome(id, 's', m.Row.PENDING, ended=False)
        assert set(self.outbox.fresh) == set(self.model)

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def wait(self, seconds):
        self.now += seconds
        following = self.outbox.due(self.now)
        assert following > self.now
        assert (following == math.inf) == (not self.outbox.deferred)

    @invariant()
    def holds_each_id_once(self):
        ids = list(self.outbox.ids())
        assert sorted(ids) == sorted(self.model) and len(self.outbox) == len(ids)
        held = dict(self.outbox.fresh)
        held.update(self.outbox.sent)
        held.update((id, outcome) for id, (_, outcome) in self.outbox.deferred.items())
        assert held == self.model
        assert self.outbox.unwritten('s') == sum(o.column != 'processed' for id, o in held.items()
                                                 if id not in self.outbox.deferred)


# -- statistics --------------------------------------------------------------------------------------------------------

counted = st.tuples(st.sampled_from('ab'), st.sampled_from(m.COLUMNS + (None,)), st.booleans(), st.booleans(),
                    st.lists(st.sampled_from('abc'), max_size=2), st.sampled_from(['', 'flush', 'seal', 'lose']))


@given(st.lists(counted))
def test_statistics_are_added_once_whatever_becomes_of_the_flushes(events):
    stats, added, seen = m.Stats(), collections.Counter(), 0
    expected = collections.Counter()

    def flush():
        nonlocal seen
        batch = stats.seal(1)
        if batch['flush'] > seen:  # what the guard in the database does
            seen = batch['flush']
            added['total'] += batch['total']
            added['messages'] += batch['messages']
            for column in m.COLUMNS:
                for stage, number in zip(batch['stages'], batch[column]):
                    added[stage, column] += number

    for stage, column, ended, left, fused, what in events:
        stats.count(m.Outcome(1, stage, m.Row.FAILED, ended=ended, column=column, fused=tuple((f, 1.0) for f in fused)),
                    left)
        expected['messages'] += left
        if ended:
            expected['total'] += 1 + len(fused)
            expected.update((f, 'processed') for f in fused)
            expected.update([(stage, column)] if column else [])
        if what:
            stats.seal(1)
        if what in ('flush', 'lose'):
            flush()  # lost: the commit is not known, it is sent again
        if what == 'flush':
            stats.flushed()
    for _ in range(2):
        flush()
        stats.flushed()
    assert not stats and +added == +expected


# -- pool --------------------------------------------------------------------------------------------------------------

class PoolMachine(RuleBasedStateMachine):
    """A stage in a world that claims what there is room for, hands it out by the rule, answers, dies and recycles."""

    def __init__(self):
        super().__init__()
        self.stage = None
        self.next_id = 1

    def _start(self, parallelism, queue_limit, max_messages, pack_below_s):
        self.stage = Stage(m, parallelism=parallelism, queue_limit=queue_limit, max_messages=max_messages,
                           pack_below_s=pack_below_s)
        self.pool = self.stage.pool

    @precondition(lambda self: self.stage is None)
    @rule(parallelism=st.integers(1, 4), queue_limit=st.integers(1, 4), max_messages=st.sampled_from([0, 1, 3]),
          pack_below_s=st.sampled_from([0.0, 0.1, 1.0]))
    def start(self, parallelism, queue_limit, max_messages, pack_below_s):
        self._start(parallelism, queue_limit, max_messages, pack_below_s)

    @precondition(lambda self: self.stage)
    @rule(part=st.floats(0, 1))
    def claim(self, part):
        room = self.pool.room(self.stage.now)
        number = int(room * part)
        if room:
            self.stage.claim(*range(self.next_id, self.next_id + number))
            self.next_id += number

    @precondition(lambda self: self.stage and self.pool.ready)
    @rule()
    def hand(self):
        before = {w: len(w.inflight) for w in self.pool.workers}
        idle = [w for w in self.pool.workers if w.room() and not w.inflight]
        below_s = self.pool.config.pack_below_s
        slow = [w for w in self.pool.workers if w.inflight and w.busy_s(self.stage.now) >= below_s]
        count = len(self.pool.workers)
        self.stage.hand_out()
        startable = len(self.pool.workers) < self.pool.config.parallelism
        still_idle = [w for w in idle if not w.inflight]
        # Nobody waits behind a slow head while a worker is idle or could be started.
        if startable or still_idle:
            assert not any(len(w.inflight) > before[w] for w in slow)
        # No worker is started while one is idle.
        if still_idle:
            assert len(self.pool.workers) == count
        # Work is left only while the speed is to show, or nobody can take any.
        if self.pool.ready and (startable or still_idle):
            assert self.pool.quick() is None

    @precondition(lambda self: self.stage and self.pool.in_flight())
    @rule(choice=st.integers(0, 3), seconds=st.sampled_from([0.001, 0.05, 0.3, 2.0]))
    def answer(self, choice, seconds):
        busy = [w for w in self.pool.workers if w.inflight]
        worker = busy[choice % len(busy)]
        self.stage.answer(worker, seconds)
        if not worker.inflight and worker.room() == 0:  # recycled
            worker.leave()
            worker.bury()
            self.pool.workers.remove(worker)

    @precondition(lambda self: self.stage and self.pool.workers)
    @rule(choice=st.integers(0, 3))
    def die(self, choice):
        worker = self.pool.workers[choice % len(self.pool.workers)]
        worker.bury()
        self.pool.workers.remove(worker)

    @precondition(lambda self: self.stage)
    @rule(seconds=st.sampled_from([0.01, 0.15, 1.5]))
    def wait(self, seconds):
        self.stage.now += seconds
        for worker in self.pool.workers:
            worker.watch_start(self.stage.now)

    @precondition(lambda self: self.stage)
    @invariant()
    def never_more_than_allowed(self):
        pool, config = self.pool, self.pool.config
        assert len(pool.workers) <= config.parallelism
        assert all(len(w.inflight) <= config.queue_limit for w in pool.workers)
        assert all(not config.max_messages or w.handed <= config.max_messages for w in pool.workers)
        assert len(pool.ready) + pool.in_flight() + pool.room(self.stage.now) <= config.parallelism * config.queue_limit
        assert 0 <= pool.worth_claiming(self.stage.now) <= pool.room(self.stage.now)
        assert list(pool.ready) == sorted(pool.ready)
        if not pool.in_flight() and not pool.ready:
            assert pool.worth_claiming(self.stage.now) == pool.room(self.stage.now) > 0


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 30))
def test_quick_work_takes_as_few_workers_as_hold_it(parallelism, queue_limit, number):
    stage = Stage(m, parallelism=parallelism, queue_limit=queue_limit)
    stage.make_quick()
    number = min(number, stage.pool.room(stage.now))
    stage.claim(*range(100, 100 + number))
    placed = stage.hand_out()
    assert sum(placed) == number and len(placed) == math.ceil(number / queue_limit)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 30))
def test_slow_work_takes_as_many_workers_as_there_are(parallelism, queue_limit, number):
    stage = Stage(m, parallelism=parallelism, queue_limit=queue_limit)
    stage.make_quick(1.0)
    number = min(number, stage.pool.room(stage.now))
    stage.claim(*range(100, 100 + number))
    placed = stage.hand_out()
    assert len(placed) == min(number, parallelism)


brief = settings(max_examples=30, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])
TestTimers = TimersMachine.TestCase
TestOutbox = OutboxMachine.TestCase
TestPool = PoolMachine.TestCase
TestTimers.settings = TestOutbox.settings = TestPool.settings = brief
