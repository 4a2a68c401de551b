"""The real dispatcher under a fake clock: generated histories of workers, a database and an operator that misbehave.

    python test/simulation.py SEED          replay one history and print what happens
    python test/simulation.py FIRST LAST    run many

Everything around `Dispatcher.turn` is fake: the selector advances the clock instead of sleeping, children are
generators, the queue is a dict. A seed makes the whole history, so a failure is replayed by its number. The module
that is tested is an argument: planted defects are tested in a copy.

After every turn `World.check` compares the dispatcher with what the fakes know by themselves: the *ledger* of each
child (what was handed to it, what it has read, what it answered), the table, the claims that are open. What breaks a
promise raises Broken, whose first word names the promise.
"""
import collections
import contextlib
import errno
import heapq
import itertools
import logging
import math
import os
import random
import selectors
import signal
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import pepsidispatch

FINAL = frozenset(['done', 'failed', 'timeout'])
HOUR = 3600.0
PATIENCE_S = 2.0  # how long anything may wait that could go on at once
SPINS = 300  # turns within a millisecond

READ = object()  # what a program yields to get its next line; None is the end of file

Counts = collections.namedtuple('Counts', 'stages totals')


class Broken(AssertionError):
    """A promise is broken; the text begins with the name of the promise."""


class Gone(Exception):
    """Stands in for an error of the database."""


# -- the fake world ----------------------------------------------------------------------------------------------------

class Row:
    """A row of the queue."""

    def __init__(self, stage, status='pending', timeout=None):
        self.stage = stage
        self.status = status
        self.timeout = timeout  # an instant of the clock, infinity or None
        self.state = {}


class Table:
    """The database: rows, statistics, locks; what is true whoever is connected."""

    def __init__(self, world):
        self._world = world
        self.rows = {}
        self.locked = {}  # id -> until when somebody else holds its lock
        self.bad = {}  # id -> until when a trigger refuses our write
        self.epoch = 0
        self.flush = 0
        self.totals = [0, 0]  # stages, messages
        self.stats = {}  # stage -> [processed, failed, timeouts, crashes, seconds]
        self.listeners = []
        self.silent = False  # who inserts does not notify
        self.unheard = 0  # silent transactions that are still to commit
        self._ids = itertools.count(1)

    def insert(self, stage, status='pending', timeout=None, id=None, silent=None):
        """What pepsi-ingress does, and its trigger, which is silent if that is in force, or was at the statement."""
        id = next(self._ids) if id is None else id
        self.rows[id] = Row(stage, status, timeout)
        if not (self.silent if silent is None else silent):
            self.notify()
        return id

    def insert_late(self, stage, delay_s):
        """The same in a transaction that commits later; where it is silent nobody hears of it then."""
        silent = self.silent
        self.unheard += silent

        def commit():
            self.unheard -= silent
            self.insert(stage, silent=silent)

        self._world.after(delay_s, commit)

    def update(self, id, **values):
        """What somebody else does, and init's trigger. A missing row is no error."""
        row = self.rows.get(id)
        if row is None:
            return
        before = row.stage, row.status, row.timeout
        for name, value in values.items():
            setattr(row, name, value)
        if (row.status in ('pending', 'paused') and before[1] != 'running'
                and before != (row.stage, row.status, row.timeout) and not self.silent):
            self.notify()

    def notify(self):
        """NOTIFY ingress."""
        for listener in self.listeners:
            listener()

    def is_locked(self, id):
        """Whether somebody else holds the lock of a row."""
        return self.locked.get(id, 0) > self._world.now

    def is_bad(self, id):
        """Whether a write to the row fails for a reason of its own."""
        return self.bad.get(id, 0) > self._world.now


class FakeSelector:
    """Advances the clock instead of sleeping; strict about what is registered, as the real ones are."""

    def __init__(self, world):
        self._world = world
        self._map = {}
        self.closed = False

    def register(self, fd, events, data=None):
        if fd in self._map or fd not in self._world.fds:
            raise KeyError('descriptor %r is registered or not open' % fd)
        self._map[fd] = selectors.SelectorKey(fd, fd, events, data)

    def unregister(self, fd):
        del self._map[fd]

    def get_map(self):
        return self._map

    def close(self):
        self.closed = True
        self._map.clear()

    def select(self, timeout=None):
        world = self._world
        world.end_turn(timeout)
        deadline = world.now + timeout
        while True:
            while world.events and world.events[0][0] <= world.now:  # while it was busy, or stopped
                world.step()
            ready = [(key, events) for key, events in
                     [(key, world.fds[fd](fd) & key.events) for fd, key in self._map.items()] if events]
            if ready or not world.events or world.events[0][0] > deadline:
                if not ready:
                    world.now = max(world.now, deadline)
                return ready
            world.step()


class FakeSignals:
    """The self-pipe."""

    def __init__(self, world):
        self._caught = set()
        self._world = world
        self.fd = world.open_fd(lambda fd: selectors.EVENT_READ if self._caught else 0)

    def send(self, number):
        """Have the dispatcher get a signal."""
        self._caught.add(number)

    def take(self):
        caught, self._caught = self._caught, set()
        return caught

    def close(self):
        self._world.close_fd(self.fd)


class FakeChild:
    """A child process as Child shows it. The program is a generator that yields READ or seconds to sleep; what it
    returns is its exit status, negative: the signal that killed it."""

    def __init__(self, world, stage, program, capacity=65536, holder=False):
        self.world = world
        self.stage = stage
        self.capacity = capacity  # of its stdin pipe
        self.stdin = world.open_fd(self._stdin_events)
        self.stdout = world.open_fd(self._stdout_events)
        self.pid = world.new_pid(self)
        self.status = None  # wait status, once it has ended
        self.reaped = False
        self.doomed = False  # SIGKILL is under way
        self.killed_at = None  # ... and who sent it was the dispatcher
        self.asked = False  # its stdin was closed while it lived
        self.deaf = False  # SIGTERM does nothing
        self._holder = holder  # a grandchild in a session of its own holds its stdout
        self._in = b''
        self._out = b''
        self._eof = False  # of its stdin
        self._out_open = True
        self._reading = False
        self._program = program(self)
        # the ledger
        self.handed = []  # ids, from the bytes that were written to it
        self.written = b''  # the rest that is no line yet
        self.taken = 0  # bytes it has read
        self.bytes = 0  # bytes that were written to it
        self.said = collections.deque()  # [bytes left, meaning] of what the dispatcher has not read
        self.answers = {}  # id -> (status, seconds, fused), read by the dispatcher
        self.head_since = None
        self.trusted = True
        self.outage = None  # whether the link was down when it was reaped
        self.head_at_death = None
        self.began_at_death = False
        world.after(0.0, self._run)

    # for the program

    def say(self, data, meaning=None):
        """Write to stdout. meaning: what a correct dispatcher makes of the line that ends here; ('ok', id, fused),
        ('fail', id, number) or ('bad',); None: nothing ends here."""
        if self._out_open:
            self._out += data
            self.said.append([len(data), meaning])

    def close_out(self):
        """Close stdout and live on."""
        self._out_open = False

    def _run(self, value=None):
        if self.status is not None:
            return
        try:
            step = self._program.send(value)
        except StopIteration as end:
            self.exit(end.value or 0)
            return
        if step is READ:
            self._reading = True
            self._poke()
        else:
            self.world.after(step, self._run)

    def _poke(self):
        if self._reading and (b'\n' in self._in or self._eof):
            self._reading = False
            self.world.after(0.0003, self._take_line)

    def _take_line(self):
        if self.status is not None:
            return
        line, newline, rest = self._in.partition(b'\n')
        if newline:
            self._in = rest
            self.taken += len(line) + 1
        self._run(int(line) if newline else None)

    def exit(self, code):
        """End; negative: by that signal."""
        if self.status is None:
            self.status = -code if code < 0 else code << 8
            self._out_open = False
            self.began_at_death = self._began(self.head())
            self.head_at_death = self.head()
            self.world.ended_one(self)

    # for the dispatcher

    def read(self):
        if self.stdout is None:
            return b''
        if not self._out:
            gone = not self._out_open and not (self._holder and not self.reaped)
            return b'' if gone else None
        size = self.world.chunk()
        data, self._out = self._out[:size], self._out[size:]
        self._deliver(len(data))
        return data

    def write(self, data):
        if self.stdin is None or self.status is not None:
            return -1
        size = min(len(data), self.capacity - len(self._in))
        self._in += data[:size]
        self.bytes += size
        lines = (self.written + data[:size]).split(b'\n')
        self.written = lines.pop()
        for line in lines:
            self._accept(int(line))
        self._poke()
        return size

    def unread(self):
        return len(self._in) if self.stdin is not None else 0

    def signal(self, number, group=False):
        if self.reaped:
            raise Broken('reap: signal %d to pid %d, which was reaped' % (number, self.pid))
        if number == signal.SIGKILL:
            if not self.doomed and self.status is None:
                self.doomed = True
                self.killed_at = self.world.now
                self.world.kills += 1
                self.world.after(0.001, lambda: self.exit(-signal.SIGKILL))
        elif not self.deaf and self.status is None:
            self.world.after(self.world.random.choice([0.0, 0.02]), lambda: self.exit(-number))

    def reap(self):
        if self.reaped:
            raise Broken('reap: pid %d twice' % self.pid)
        self.exit(-signal.SIGKILL)
        self.reaped = True
        self.outage = self.world.losses if self.world.is_ready() else None
        self.world.free_pid(self)
        return self.status

    def close_stdin(self):
        fd, self.stdin = self.stdin, None
        if fd is not None:
            self.asked = self.asked or self.status is None
            self._eof = True
            self.world.close_fd(fd)
            self._poke()

    def close_stdout(self):
        fd, self.stdout = self.stdout, None
        if fd is not None:
            self.world.close_fd(fd)

    # the ledger

    def head(self):
        """The oldest id that was handed to it and is not answered; None: there is none."""
        return next((i for i in self.handed if i not in self.answers), None)

    def _began(self, id):
        if id is None:
            return False
        before = sum(len(b'%d\n' % i) for i in itertools.takewhile(lambda i: i != id, self.handed))
        return self.taken > before

    def _accept(self, id):
        world = self.world
        if self.head() is None:
            self.head_since = world.now
        self.handed.append(id)
        world.last_child[id] = self
        world.handed_at[self.stage] = world.now
        # Note: one id may come to the same child again; its answer of the first time is history then.
        if self.answers.pop(id, None):
            self.handed.remove(id)

    def _deliver(self, size):
        while size:
            entry = self.said[0]
            step = min(size, entry[0])
            entry[0] -= step
            size -= step
            if not entry[0]:
                self.said.popleft()
                if entry[1] and self.trusted:
                    self._judge(entry[1])

    def _judge(self, meaning):
        head = self.head()
        if meaning[0] == 'bad' or head is None:
            self.trusted = False
            self.world.violations += 1
            return
        if meaning[1] != head:
            raise Broken('order: child %d answers %d, %s is its head of line' % (self.pid, meaning[1], head))
        seconds = self.world.now - self.head_since
        if meaning[0] == 'ok':
            self.answers[head] = (0, seconds, meaning[2])
        else:
            self.answers[head] = (meaning[2], seconds, ())
        self.head_since = self.world.now

    def _stdin_events(self, fd):
        free = self.status is not None or len(self._in) < self.capacity
        return selectors.EVENT_WRITE if free else 0

    def _stdout_events(self, fd):
        gone = not self._out_open and not (self._holder and not self.reaped)
        return selectors.EVENT_READ if self._out or gone else 0


class FakeQueue:
    """The database session as Queue shows it: the same states, facts, guards and limits."""

    def __init__(self, world, table):
        self._m = world.m
        self._world = world
        self._table = table
        self.link = self._m.Link.AWAY
        self.epoch = None
        self.deadline = 0.0
        self.fd = None
        self.writing = False
        self.backend = 1
        self.statements = 0
        self.log = []  # (instant, name) of every statement of an operation
        self._facts = collections.deque()  # arrived, not received
        self._notices = self._bell = 0
        self._listening = False
        self._operation = None
        self._executes_at = 0.0  # when the server is done with the last statement, whether we wait for it or not
        self._session = 0
        self._failures = 0
        self._skip_until = -math.inf
        self.hushes, self._unheard = False, True
        self.partial = False  # the last claim met a bad row
        self._parked = {}  # bad rows: passed over until when, tries
        self.robbed = False  # the session has lost its lock without noticing it
        table.listeners.append(self._notified)

    def _notified(self):
        if self._listening and not self._world.frozen:
            self._notices += 1

    def _events(self, fd):
        return selectors.EVENT_READ if self._facts or self._notices else 0

    # life-cycle

    def tick(self):
        if self._world.now < self.deadline:
            return []
        if self.link is self._m.Link.AWAY:
            return self._connect()
        return self._lose('no reply')

    def receive(self):
        self._bell += self._notices
        self._notices = 0
        received = []
        while self._facts:
            fact = self._facts.popleft()
            if isinstance(fact, self._m.Lost):
                return received + self._lose(fact.reason)
            if isinstance(fact, self._m.Reply):
                self._operation = None
                self.deadline = math.inf
                self._world.replied(fact)
            elif isinstance(fact, self._m.Taken):
                self.link = self._m.Link.READY
                self.deadline = math.inf
                self._failures = 0
            elif isinstance(fact, self._m.Replaced):
                self.deadline = math.inf
            received.append(fact)
        return received

    def close(self):
        self._drop()
        self.deadline = math.inf

    def busy(self):
        return self.link is not self._m.Link.READY or self._operation is not None

    def give_up(self, reason):
        return self._lose(reason)

    def skipping(self):
        return self._world.now < self._skip_until

    def rung(self):
        rung, self._bell = self._bell, 0
        return rung

    def snap(self, reason='terminated by the administrator'):
        """Break the link from outside."""
        if self.link is not self._m.Link.AWAY:
            self._listening = False
            self._facts.append(self._m.Lost(reason))

    def _connect(self):
        self._session += 1
        self.fd = self._world.open_fd(self._events)
        self.link = self._m.Link.OPENING
        self.deadline = self._world.now + self._m.CONNECT_TIMEOUT_S
        self._open_later(self._session, 0.004)
        return []

    def _open_later(self, session, delay_s):
        self._world.after(delay_s, lambda: self._open(session))

    def _open(self, session):
        world, m = self._world, self._m
        if session != self._session or self.link is not m.Link.OPENING:
            return
        if world.down or world.frozen:
            if not world.frozen:
                self._facts.append(m.Lost('connection refused'))
        elif world.now < max(self._executes_at, world.lock_held_until):
            self._facts.append(m.Waiting('somebody'))
            self.deadline = world.now + 2 * m.LOCK_POLL_S
            self._open_later(session, m.LOCK_POLL_S)
        elif self.epoch is not None and self.epoch != self._table.epoch:
            self._facts.append(m.Replaced(self._table.epoch))
        else:
            if self.epoch is None:
                self._table.epoch += 1
                self.epoch = self._table.epoch
            self._listening, self.robbed = True, False
            self._facts.append(m.Taken('system', self.epoch, self._table.flush))

    def _lose(self, reason):
        first, longest = self._m.RECONNECT_S
        self._drop()
        self.deadline = self._world.now + min(first * 2 ** min(self._failures, 20), longest)
        self._failures += 1
        self._world.lost()
        return [self._m.Lost(reason)]

    def _drop(self):
        if self.fd is not None:
            self._world.close_fd_later(self.fd)
        self.link, self.fd, self._operation = self._m.Link.AWAY, None, None
        self._session += 1
        self._listening = self._table.silent = self.hushes = False
        self._unheard = True
        self._notices = 0
        self._facts.clear()

    # operations

    def claim(self, wants, held):
        self._world.claiming(wants, held)
        return self._start('claim', lambda: self._claim(wants, frozenset(held)))

    def settle(self, outcomes):
        self._world.settling(outcomes)
        return self._start('settle', lambda: self._settle(outcomes))

    def exchange(self, outcomes, wants, held):
        self._world.settling(outcomes)
        self._world.claiming(wants, held)
        return self._start('exchange', lambda: self._exchange(outcomes, wants, frozenset(held)))

    def revive(self, held, sweep):
        if sweep:
            self._world.sweeping(held)
        return self._start('revive', lambda: self._revive(frozenset(held), sweep))

    def strangers(self, stages):
        stages = frozenset(stages)
        return self._start('strangers', lambda: sorted({(row.stage,) for row in self._table.rows.values()
                                                        if row.status == 'pending' and row.stage not in stages}))

    def hush(self, silent):
        return self._start('hush', lambda: self._hush(silent))

    def flush(self, batch):
        batch = dict(batch)
        return self._start('flush', lambda: self._flush(batch))

    def _start(self, name, execute):
        if self.busy():
            raise Broken('session: %s while %s is under way' % (name, self._operation))
        self.statements += 1
        self.log.append((self._world.now, name))
        fate, delay_s = self._world.fate(name)
        if fate == 'send':
            return self._lose('cannot send')
        self._operation = name
        self.deadline = self._world.now + self._m.STATEMENT_TIMEOUT_S + self._m.REPLY_MARGIN_S
        self._execute_later(self._session, name, execute, fate, delay_s)
        return []

    def _execute_later(self, session, name, execute, fate, delay_s):
        if fate != 'before':
            self._executes_at = self._world.now + delay_s
        self._world.after(delay_s, lambda: self._execute(session, name, execute, fate))

    def _execute(self, session, name, execute, fate):
        m, value, error = self._m, None, None
        if fate == 'error':
            error = Gone('canceling statement due to statement timeout')
        elif fate != 'before':
            value = execute()
            if value is None:  # a lock was in the way
                self._execute_later(session, name, execute, fate, m.LOCK_TIMEOUT_S)
                return
        if session != self._session or self._world.frozen or fate == 'silent':
            return
        if fate in ('before', 'after'):
            self.snap('server closed the connection')
        else:
            self._facts.append(m.Reply(name, value, error))

    def _wait_for_lock(self):
        """Whether a statement that met a lock is to be repeated: from now on it skips what is locked."""
        if self.skipping():
            return False
        self._skip_until = self._world.now + self._m.SKIP_LOCKED_S
        return True

    def parked(self):
        """The ids that are passed over now."""
        return {id for id, (until, _) in self._parked.items() if until > self._world.now}

    def parked_until(self):
        return min((until for until, _ in self._parked.values() if until > self._world.now), default=math.inf)

    def _park(self, id):
        tries = self._parked.get(id, (0.0, 0))[1]
        first, longest = self._m.DEFER_S
        self._parked[id] = self._world.now + min(first * 2 ** tries, longest), tries + 1

    def _claim(self, wants, held):
        table, taken = self._table, []
        held = held.union(self.parked())
        self.partial = False
        for want in wants:
            fit = (id for id in sorted(table.rows) if table.rows[id].status == 'pending'
                   and table.rows[id].stage == want.stage and id >= want.floor and id not in held)
            if table.locked:
                fit = list(fit)
                if any(map(table.is_locked, fit[:want.cap])) and self._wait_for_lock():
                    return None
                fit = [id for id in fit if not table.is_locked(id)]
            fit = list(itertools.islice(fit, want.cap))
            if any(map(table.is_bad, fit)):  # the first one alone; if that is it, it is parked
                self.partial, fit = True, fit[:1]
                if table.is_bad(fit[0]):
                    self._park(fit.pop())
            taken += [(id, want.stage) for id in fit]
        for id, _ in taken:
            table.rows[id].status = 'running'
            self._world.note('claimed %d', id)
        self._world.random.shuffle(taken)
        return taken

    def _settle(self, outcomes):
        m, table, settled = self._m, self._table, []
        rows = [(o, table.rows.get(o.id)) for o in outcomes]
        if any(row and row.status == 'running' and table.is_locked(o.id) for o, row in rows) and self._wait_for_lock():
            return None
        for o, row in rows:
            if row is None:
                settled.append(m.Settled(o.id, None, None, None, False))
            elif row.status != 'running':
                due_s = (min(max(row.timeout - self._world.now, 0.0), 1e9) if row.status == 'paused'
                         and row.timeout is not None and abs(row.timeout) != math.inf else None)
                settled.append(m.Settled(o.id, row.status, row.stage, due_s, False))
            elif not table.is_locked(o.id) and not table.is_bad(o.id):
                at_home = row.stage == o.stage
                row.status = o.status.value if at_home else 'pending'
                if at_home and o.error is not None:
                    row.state['dispatch_error'] = o.error
                settled.append(m.Settled(o.id, row.status, row.stage, None, True))
                self._world.note('settled %d %s %s', o.id, row.status, o.error or '')
        return settled

    def _exchange(self, outcomes, wants, held):
        """One after the other, as soon as a lock is in the way; the second may fail alone then."""
        settled = self._settle(outcomes)
        if settled is None:
            return None
        if self._world.claim_fails():
            return settled, None
        rows = self._claim(wants, held)
        return settled, self._claim(wants, held) if rows is None else rows

    def _revive(self, held, sweep):
        table, now = self._table, self._world.now
        held = held.union(self.parked())
        for id, row in table.rows.items():
            if (id not in held and table.is_bad(id) and not table.is_locked(id)
                    and (row.status == 'running' and sweep or row.status == 'paused' and row.timeout is not None
                         and row.timeout <= now)):
                self._park(id)
        held = held.union(self.parked())
        free = [(id, row) for id, row in sorted(table.rows.items()) if id not in held]
        lost = [(id, row) for id, row in free if sweep and row.status == 'running']
        paused = [(id, row) for id, row in free if row.status == 'paused' and row.timeout is not None]
        ripe = sorted([(id, row) for id, row in paused if row.timeout <= now],
                      key=lambda item: item[1].timeout)[:self._m.RETRY_LIMIT]
        following = [row.timeout - now for _, row in paused if now < row.timeout < math.inf]
        reply = []
        for what, rows in (('reset', lost), ('retried', ripe)):
            count = collections.Counter()
            for id, row in rows:
                if not table.is_locked(id):
                    row.status = 'pending'
                    count[row.stage] += 1
                    self._world.note('%s %d', what, id)
            reply += [(what, stage, number, None) for stage, number in count.items()]
        return reply + [('lock', None, int(sweep and not self.robbed), None), ('lost', None, len(lost), None),
                        ('ripe', None, len(ripe), None), ('next', None, 0, min(following) if following else None)]

    def _hush(self, silent):
        if silent and self._world.crowded():
            self._table.silent = self.hushes = self._unheard = True
        elif not silent and not self._table.unheard:
            self._table.silent = self.hushes = self._unheard = False
        return self._unheard

    def _flush(self, batch):
        table, before = self._table, (self._table.epoch, self._table.flush)
        if table.epoch != batch['epoch'] or table.flush >= batch['flush']:
            return [(None,) + before]
        table.flush = batch['flush']
        table.totals[0] += batch['total']
        table.totals[1] += batch['messages']
        columns = zip(batch['stages'], batch['processed'], batch['failed'], batch['timeouts'], batch['crashes'],
                      batch['seconds'])
        for stage, *values in columns:
            row = table.stats.setdefault(stage, [0, 0, 0, 0, 0.0])
            row[:] = [a + b for a, b in zip(row, values)]
        return [(table.flush,) + before]


class World:
    """Clock, events, everything fake, and the checks. Tests make one, fill its table, and turn the dispatcher."""

    def __init__(self, config, module=pepsidispatch, seed=0, program=None, trace=False, **options):
        """config: text of a pepsi.conf. program: (child) -> generator, default well_behaved. options: of Dispatcher."""
        self.m = module
        self.random = random.Random(seed)
        self.now = 1000.0
        self.events = []
        self.fds = {}
        self.children = []  # not reaped
        self.spawned = 0
        self.last_child = {}  # id -> the child it was handed to last
        self.handed_at = {}  # stage -> instant
        self.executing = {}  # id -> child
        self.passes = collections.Counter()  # id -> how often its execution began
        self.down = self.frozen = False
        self.lock_held_until = 0.0
        self.losses = 0
        self.violations = 0
        self.stopped_s = 0.0  # how long the dispatcher was stopped
        self.kills = 0  # SIGKILLs of the dispatcher
        self.hasty = False  # what comes within a millisecond comes while the dispatcher is busy with its turn
        self.survivors = 0  # looks of the dispatcher until those of an earlier one are gone
        self.open_claims = {}  # id -> stage
        self.count = Counts({}, [0, 0])  # our own statistics
        self.unfinished = self.protocol = 0
        self.refuse = lambda stage: None  # -> an OSError, if its program cannot be started now
        self._program = program or well_behaved
        self._trace = trace
        self._numbers = itertools.count()
        self._turns = 0
        self._turned_at = self.now
        self._since = {}  # what could go on -> since when
        self._sent = {}  # id -> Outcome, of the settlement under way
        self.config = module.parse_config(config, '/pepsi.conf')
        self.born_with = {}  # pid -> StageConfig
        self.most = {}  # stage -> PARALLELISM, QUEUE_LIMIT: the most under any configuration so far
        self.longest_grace_s = 0.0
        self._note_limits()
        self.table = Table(self)
        self.queue = FakeQueue(self, self.table)
        self.signals = FakeSignals(self)
        self.selector = FakeSelector(self)
        self.dispatcher = module.Dispatcher(
            self.config, self.queue, self.signals, start_child=self._start_child, clock=lambda: self.now,
            selector=self.selector, ended=self._ended, survivors=self._find_survivors, load=lambda: self.config,
            sleep=self._sleep, **options)

    def reload(self, config):
        """Change the configuration and send HUP."""
        self.config = self.m.parse_config(config, '/pepsi.conf')
        self._note_limits()
        self.signals.send(signal.SIGHUP)

    def _note_limits(self):
        self.longest_grace_s = max(self.longest_grace_s, self.config.stop_timeout_s)
        for name, stage in self.config.stages.items():
            workers, limit = self.most.get(name, (0, 0))  # old workers finish beside the new ones, with the old limit
            self.most[name] = max(workers, stage.parallelism), max(limit, stage.queue_limit)

    # what the fakes use

    def after(self, delay_s, do):
        """Have something done after a delay."""
        heapq.heappush(self.events, (self.now + delay_s, next(self._numbers), do))

    def step(self):
        """Advance to the next event."""
        when, _, do = heapq.heappop(self.events)
        self.now = max(self.now, when)
        do()

    def _sleep(self, seconds):
        until = self.now + seconds
        while self.events and self.events[0][0] <= until:
            self.step()
        self.now = max(self.now, until)

    def open_fd(self, get_events):
        """Return the lowest free descriptor, as the system does."""
        fd = next(fd for fd in itertools.count(3) if fd not in self.fds)
        self.fds[fd] = get_events
        return fd

    def close_fd(self, fd):
        if fd in self.selector.get_map():
            raise Broken('selector: descriptor %d is closed while it is registered' % fd)
        del self.fds[fd]

    def close_fd_later(self, fd):
        """The queue's: the dispatcher has it unregistered when it sees that it has changed."""
        self.fds[fd] = lambda fd: 0
        self.after(0.0, lambda: self.close_fd(fd))

    def new_pid(self, child):
        self.children.append(child)
        used = {c.pid for c in self.children if c is not child}
        return next(pid for pid in itertools.count(101) if pid not in used)

    def free_pid(self, child):
        self.children.remove(child)

    def chunk(self):
        """How much one read of a pipe returns."""
        return 65536

    def latency(self):
        """Of a statement."""
        return 0.001

    def fate(self, name):
        """What becomes of a statement: 'send', 'before' and 'after' (the link is lost at sending, before or after
        the commit), 'silent' (no reply), 'error', or 'ok'; and its latency."""
        return 'ok', self.latency()

    def crowded(self):
        """Whether those who insert wait for one another."""
        return True

    def claim_fails(self):
        """Whether the second half of an exchange fails where the first did not."""
        return False

    def ended_one(self, child):
        for id in [id for id, c in self.executing.items() if c is child]:
            del self.executing[id]
        self.note('child %d ends with %d', child.pid, child.status)
        self.signals.send(signal.SIGCHLD)

    def is_ready(self):
        return self.queue.link is self.m.Link.READY

    def note(self, text, *values):
        """Print a line of the history."""
        if self._trace:
            print('%10.4f    %s' % (self.now - 1000, text % values))

    def begin(self, child, id):
        """A program begins to execute an id."""
        if id in self.executing:
            raise Broken('twice: %d is executed by two workers at a time' % id)
        self.note('child %d begins %d', child.pid, id)
        self.executing[id] = child
        self.passes[id] += 1

    def finish(self, id):
        """It is done with the row, whatever it says then."""
        self.executing.pop(id, None)

    def _start_child(self, argv, environ):
        stage = environ['PEPSI_STAGE']
        refusal = self.refuse(stage)
        if refusal is not None:
            raise refusal
        self.spawned += 1
        child = self.make_child(stage)
        self.born_with[child.pid] = self.dispatcher.pools[stage].config
        self.note('child %d starts stage=%s', child.pid, stage)
        return child

    def make_child(self, stage):
        return FakeChild(self, stage, self._program)

    def _ended(self):
        if self.hasty:
            now = self.now
            while self.events and self.events[0][0] <= now + 0.001:
                self.step()
            self.now = now
        looks = 0
        while True:
            child = next((c for c in self.children if c.status is not None), None)
            looks += 1
            if child is None:
                return
            if looks > 100:
                raise Broken('reap: pid %d is not reaped' % child.pid)
            yield child.pid

    def _find_survivors(self, system, epoch):
        self.survivors -= self.survivors > 0
        return [2 ** 30] if self.survivors else []  # no system has such a pid: the kill does nothing

    # what the queue tells

    def lost(self):
        self.losses += 1
        self._sent = {}

    def claiming(self, wants, held):
        if self.survivors:
            raise Broken('survivors: a claim while a worker of an earlier dispatcher lives')
        for want in wants:
            if not self.dispatcher.pools[want.stage].breaker.closed(self.now):
                raise Broken('cooldown: a claim for stage %s' % want.stage)
        if set(self.open_claims) - set(held):
            raise Broken('held: %s are held and may be claimed' % sorted(set(self.open_claims) - set(held)))

    def sweeping(self, held):
        if self.survivors:
            raise Broken('survivors: a sweep while a worker of an earlier dispatcher lives')
        if set(self.open_claims) - set(held):
            raise Broken('held: %s are held and may be reset' % sorted(set(self.open_claims) - set(held)))

    def replied(self, reply):
        if reply.error is not None:
            self._sent = {}
            return
        settled, rows = {'settle': (reply.value, ()), 'claim': ((), reply.value),
                         'exchange': reply.value}.get(reply.name, ((), ()))
        for row in settled:
            self._count(self._sent.pop(row.id), row)
            del self.open_claims[row.id]
        for id, stage in rows or ():
            if id in self.open_claims:
                raise Broken('held: %d was claimed a second time' % id)
            self.open_claims[id] = stage
            self.last_child.pop(id, None)

    def settling(self, outcomes):
        self._sent = {o.id: o for o in outcomes}
        for o in outcomes:
            if o.id not in self.open_claims:
                raise Broken('outcome: %d has one without a claim' % o.id)
            if o.stage != self.open_claims[o.id]:
                raise Broken('outcome: %d was claimed for another stage' % o.id)
            self._judge(o)

    def _judge(self, o):
        """Compare an outcome with the ledger of the child that had the id."""
        child = self.last_child.get(o.id)
        if child is None or o.id not in child.handed:
            if o.ended:
                raise Broken('blame: %d was never handed out, but %s' % (o.id, o.error))
            return
        answer = child.answers.get(o.id)
        if answer:
            right = 'processed' if answer[0] == 0 else 'failed'
            if not o.ended or o.column != right:
                raise Broken('answer: %d was answered with %d, its outcome is %s %s' % (o.id, answer[0], o.column,
                                                                                       o.error))
            if answer[0] and not o.error.startswith('status: %d' % answer[0]):
                raise Broken('answer: %d failed because of %s' % (o.id, o.error))
        elif o.ended:
            if o.column in ('processed', 'failed'):
                raise Broken('answer: %d has none, its outcome is %s' % (o.id, o.column))
            if o.id != child.head_at_death and o.id != child.head():
                raise Broken('blame: %d was not at the head of line, but %s' % (o.id, o.error))
            if o.column == 'crashes' and not child.began_at_death:
                raise Broken('blame: the worker had not begun to read %d, but %s' % (o.id, o.error))
        elif (o.id == child.head_at_death and child.began_at_death and child.killed_at is None and not child.asked
              and child.outage == self.losses and self.dispatcher.phase is self.m.Phase.SERVING):
            raise Broken('blame: the worker crashed at %d and it is requeued' % o.id)

    def _count(self, outcome, settled):
        """Our own statistics, from the ledgers."""
        if settled.status is None or settled.status in FINAL:
            self.count.totals[1] += 1
        if not outcome.ended:
            return
        self.count.totals[0] += 1
        answer = self.last_child[outcome.id].answers.get(outcome.id)
        column = outcome.column
        seconds, fused = 0.0, ()
        if answer:
            status, seconds, fused = answer
            seconds = max(0.0, seconds - sum(s for _, s in fused))
            column = 'failed' if status else 'processed'
            if not status and settled.written and settled.status == 'failed':
                column = None
                self.unfinished += 1
        elif column is None:
            self.protocol += 1
        if column:
            row = self.count.stages.setdefault(outcome.stage, [0, 0, 0, 0, 0.0])
            row[self.m.COLUMNS.index(column)] += 1
            row[4] += seconds
        for stage, s in fused:
            self.count.totals[0] += 1
            row = self.count.stages.setdefault(stage, [0, 0, 0, 0, 0.0])
            row[0] += 1
            row[4] += s

    # checks

    def end_turn(self, timeout):
        """A turn is over: the dispatcher is about to sleep."""
        if self.now > self._turned_at + 0.001:
            self._turns, self._turned_at = 0, self.now
        self._turns += 1
        if self._turns > SPINS:
            raise Broken('spin: %d turns at one instant, timers %s' % (self._turns,
                                                                       self.dispatcher.timers.pending()))
        if timeout is None or not 0 <= timeout <= self.m.LONGEST_WAIT_S:
            raise Broken('sleep: for %s s' % timeout)
        if self.dispatcher.exit_code == 0:
            self.check()

    def check(self):
        """Raise Broken unless all that is promised is true."""
        d, m = self.dispatcher, self.m
        held, serving = {}, d.phase is m.Phase.SERVING
        for stage, pool in d.pools.items():
            self._check_pool(pool, stage, held, serving)
        for id in d.outbox.ids():
            self._put(held, id, 'outbox')
        if set(held) != set(self.open_claims):
            raise Broken('lost: held are %s, claimed and not settled %s' % (held, sorted(self.open_claims)))
        if set(d.held()) - set(held) & set(held):
            raise Broken('held: an id that rests is held elsewhere, too')
        self._check_timers(serving)
        if serving:
            self._check_waiting(set(d.held()))

    def _put(self, held, id, place):
        if id in held:
            raise Broken('place: %d is in %s and in %s' % (id, held[id], place))
        held[id] = place

    def _check_pool(self, pool, stage, held, serving):
        for id in pool.ready:
            self._put(held, id, 'ready')
        if list(pool.ready) != sorted(pool.ready):
            raise Broken('order: ready ids of %s: %s' % (stage, list(pool.ready)))
        in_flight = 0
        for worker in pool.workers:
            in_flight += len(worker.inflight)
            for id in worker.inflight:
                self._put(held, id, 'worker %d' % worker.pid)
            config = self.born_with[worker.pid]
            if len(worker.inflight) > config.queue_limit:
                raise Broken('cap: worker %d holds %d ids' % (worker.pid, len(worker.inflight)))
            if config.max_messages and worker.handed > config.max_messages:
                raise Broken('cap: worker %d got %d ids in its life' % (worker.pid, worker.handed))
        most_workers, most_limit = self.most[stage]
        if len(pool.workers) > most_workers:
            raise Broken('cap: %d workers of stage %s' % (len(pool.workers), stage))
        if in_flight + len(pool.ready) > most_workers * most_limit:
            raise Broken('cap: %d ids of stage %s are running' % (in_flight + len(pool.ready), stage))
        if pool.breaker.cooling:
            if pool.ready and (self.now < pool.breaker.until or not serving):
                raise Broken('cooldown: stage %s holds %s' % (stage, list(pool.ready)))
            handed = self.handed_at.get(stage) == self.now > pool.breaker._opened
            if handed and (in_flight > 1 or pool.ready) and serving:
                raise Broken('probe: with %d ids of stage %s' % (in_flight + len(pool.ready), stage))

    def _check_timers(self, serving):
        d, states = self.dispatcher, self.m.WorkerState
        when = {key: at for at, key in d.timers.pending()}

        def need(key, at=math.inf):
            if key not in when or when[key] > at + 1e-9:
                raise Broken('timer: %s is %s, must be set%s' % (key, when.get(key, 'not set'),
                                                               '' if at == math.inf else ' to %s at most' % at))

        if serving:
            need('heartbeat', self.now + d.config.poll_interval_s)
        for pid, worker in d.workers.items():
            config = worker.pool.config
            if worker.state is states.SERVING:
                if worker.inflight and config.max_runtime_s < math.inf:
                    need(('watchdog', pid), worker.head_since + config.max_runtime_s)
                if not worker.inflight and config.worker_idle_timeout_s < math.inf:
                    need(('idle', pid), max(worker.idle_since + config.worker_idle_timeout_s, self.now + 0.1))
            elif worker.state is states.LEAVING:
                need(('grace', pid), self.now + self.longest_grace_s)
            elif worker.alive() and worker.inflight and config.max_runtime_s < math.inf:
                need(('watchdog', pid))
        for name, pool in d.pools.items():
            if serving and pool.breaker.cooling and self.now < pool.breaker.until:
                need(('cooldown', name), pool.breaker.until)
        if d.outbox.deferred:
            need('resend', min(at for at, _ in d.outbox.deferred.values()))
        if d.stats and not d._flush and self.is_ready():
            need('stats')
        for key in when:
            if isinstance(key, tuple) and key[0] in ('watchdog', 'idle', 'grace', 'eof') and key[1] not in d.workers:
                raise Broken('timer: %s of a worker that is gone' % (key,))

    def _check_waiting(self, held):
        """Whatever could go on may wait PATIENCE_S at most; nothing counts while the session cannot work."""
        d, table, m = self.dispatcher, self.table, self.m
        held = held.union(self.queue.parked())  # a row that cannot be written may wait
        before, self._since = self._since, {}
        if not self.is_ready() or 'backoff' in d.timers or self.survivors or self.frozen:
            return
        for name, pool in d.pools.items():
            breaker, parallelism = pool.breaker, pool.config.parallelism
            if breaker.cooling and (self.now < breaker.until or pool.in_flight()):
                continue
            idle = [w for w in pool.workers if w.state is m.WorkerState.SERVING and not w.inflight and w.room()]
            if not idle and (len(pool.workers) >= parallelism or self.now < breaker.spawn_at):
                continue
            for id in pool.ready:
                self._wait(before, ('ready', id))
            for id, row in table.rows.items():
                if row.status == 'pending' and row.stage == name and id not in held and not table.is_locked(id):
                    self._wait(before, ('pending', id))
        for id, row in table.rows.items():
            if row.status == 'paused' and row.timeout is not None and row.timeout <= self.now:
                if id not in held and not table.is_locked(id):
                    self._wait(before, ('paused', id))
            elif row.status == 'running' and id not in held and not table.is_locked(id):
                self._wait(before, ('running without an owner', id))

    def _wait(self, before, key):
        since = self._since[key] = before.get(key, self.now)
        if self.now - since > PATIENCE_S + self.slowness():
            raise Broken('waits: %s is %s for %.3f s and could go on' % (key[1], key[0], self.now - since))

    def slowness(self):
        """Seconds that the database may take for a turn, beyond a few milliseconds."""
        return 0.0

    # what tests use

    def turn(self):
        """One turn of the dispatcher; a step of the world belongs to it."""
        self.dispatcher.turn()

    def run(self, seconds=None, until=None, limit_s=100.0):
        """Turn for some time, or until a condition holds, which has to come within limit_s."""
        deadline = self.now + (limit_s if seconds is None else seconds) - self.stopped_s
        if seconds is not None:
            self.after(seconds, lambda: self.signals.send(signal.SIGCHLD))  # do not sleep beyond it
        while not (until and until()) and self.dispatcher.phase is not self.m.Phase.STOPPED:
            if self.now >= deadline + self.stopped_s:
                if seconds is None:
                    raise Broken('waits: %g s in vain' % limit_s)
                return
            self.turn()

    def stop(self, limit_s=None):
        """TERM, and what has to be true when it has stopped."""
        self.signals.send(signal.SIGTERM)
        self.run_to_end(limit_s)

    def run_to_end(self, limit_s=None):
        if limit_s is None:
            limit_s = self.longest_grace_s + self.m.FINISH_S + 1.0 + self.slowness()
        self.run(until=lambda: self.dispatcher.phase is self.m.Phase.STOPPED, limit_s=limit_s)
        if self.children and self.dispatcher.exit_code == 0:
            raise Broken('children: %s are left' % [c.pid for c in self.children])

    def close(self):
        """Close the dispatcher and see that nothing is left."""
        self.dispatcher.close()
        self.events = [event for event in self.events if event[0] <= self.now]
        while self.events and self.events[0][0] <= self.now:
            self.step()
        if self.children or self.fds or not self.selector.closed:
            raise Broken('left: children %s, descriptors %s' % (self.children, self.fds))

    def check_counts(self):
        """The statistics in the database are our own."""
        stages = self.count.stages
        if self.table.totals != self.count.totals or set(stages) != set(self.table.stats):
            raise Broken('statistics: stages and messages are %s, not %s; %s, not %s' % (
                self.table.totals, self.count.totals, self.table.stats, stages))
        for stage, values in stages.items():
            if (self.table.stats[stage][:4] != values[:4]
                    or abs(self.table.stats[stage][4] - values[4]) > 1e-6 * (1 + sum(values[:4]))):
                raise Broken('statistics: of stage %s are %s, not %s' % (stage, self.table.stats[stage], values))
        columns = sum(sum(values[:4]) for values in stages.values())
        if self.table.totals[0] != columns + self.unfinished + self.protocol:
            raise Broken('statistics: %d stages, %d counted, %d unfinished, %d violations' % (
                self.table.totals[0], columns, self.unfinished, self.protocol))

    def statuses(self):
        """How many rows have which status."""
        return dict(collections.Counter(row.status for row in self.table.rows.values()))


@contextlib.contextmanager
def opened(world):
    """A world that is closed, and checked for what is left, when the block ends well."""
    with silenced(world):
        yield world
        world.close()


@contextlib.contextmanager
def silenced(world):
    """Have the dispatcher's log printed with the world's time, or not at all."""
    log, handler = world.m.log, Printer(world)
    level, propagate, handlers = log.level, log.propagate, list(log.handlers)
    log.setLevel(logging.DEBUG if world._trace else logging.CRITICAL + 1)
    log.propagate, log.handlers[:] = False, [handler]
    try:
        yield
    finally:
        log.setLevel(level)
        log.propagate, log.handlers[:] = propagate, handlers


class Printer(logging.Handler):
    """Prints the dispatcher's log into the history."""

    def __init__(self, world):
        super().__init__()
        self._world = world

    def emit(self, record):
        print('%10.4f %s' % (self._world.now - 1000, record.getMessage()))


# -- programs ----------------------------------------------------------------------------------------------------------

def commit(child, id, values):
    """What a worker writes to its row, in a transaction of its own: only where it is still its row."""
    row = child.world.table.rows.get(id)
    if row is not None and row.status == 'running' and row.stage == child.stage:
        child.world.table.update(id, **values)


def working(seconds=0.01, **values):
    """Make a program that takes this long for each id; values: what it writes to the row, default: done."""
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            child.world.begin(child, id)
            yield seconds
            commit(child, id, values or {'status': 'done'})
            child.world.finish(id)
            child.say(b'0\n', ('ok', id, ()))
    return program


well_behaved = working()


def dying(child):
    """A program that reads an id and dies of it, every time."""
    id = yield READ
    if id is None:
        return 0
    child.world.begin(child, id)
    yield 0.01
    return 1


def stillborn(child):
    """A program that dies before it reads anything."""
    yield 0.02
    return 1


# -- generated histories -----------------------------------------------------------------------------------------------

GOOD = ('quick', 'quick', 'quick', 'slow')
ACTS = ('fail', 'crash', 'crash after commit', 'crash after answer', 'hang', 'garbage', 'overlong', 'wrong id',
        'two answers', 'close stdout', 'half an answer', 'unfinished', 'exit 0', 'fused')
GARBAGE = (b'hello\n', b'\n', b'00\n', b'+0\n', b'0 done\n', b'256\n', b'\xff\n')
HABITS = ('stillborn', 'ignores end of file', 'slow exit', 'dies idle', 'slow start', 'deaf', 'greedy', 'early answer',
          'grandchild', 'narrow pipe', 'in pieces')
WRITES = ('advance', 'pause', 'pause for ever', 'again', 'other', 'delete', 'fail itself')
FATES = ('send', 'before', 'after', 'silent', 'error', 'slow')
DEEDS = ('insert', 'cancel', 'delete', 'pause', 'requeue', 'move', 'lock', 'trigger', 'snap', 'outage', 'freeze',
         'refuse', 'kill a worker', 'stop the dispatcher', 'notify', 'hold the lock', 'lose the lock', 'reload',
         'report')


class History(World):
    """One generated history: a configuration, rows, workers and an operator, all from the seed."""

    def __init__(self, seed, module=pepsidispatch, trace=False):
        choose = random.Random(seed)
        # Few kinds of trouble at a time, all of them over many seeds: that finds more than everything always.
        self._acts = choose.sample(ACTS, choose.choice([0, 1, 1, 2, 4]))
        self._habits = choose.sample(HABITS, choose.choice([0, 0, 1, 2]))
        self._writes = choose.sample(WRITES, choose.choice([0, 1, 2]))
        self._fates = choose.sample(FATES, choose.choice([0, 0, 0, 1, 2]))
        self._deeds = choose.sample(DEEDS, choose.choice([0, 1, 2, 3]))
        self._rate = choose.choice([0.1, 0.4])
        self.calm = False  # the end of the history: everybody behaves
        self._refused = set()
        self._slow_until = 0.0
        self._stages = ['a', 'b', 'c'][:choose.choice([1, 1, 2, 3])]
        super().__init__(self._configure(choose, self._stages), module, choose.getrandbits(32), self._program_of, trace)
        self.survivors = choose.choice([0, 0, 0, 0, 3])
        self.refuse = self._refusal
        self.down = choose.random() < 0.1
        if self.down:
            self.after(choose.uniform(0, 2), self._heal)
        self._rows = choose.choice([1, 3, 6, 10])
        for _ in range(self._rows):
            if choose.random() < 0.3:
                self.after(choose.uniform(0, 3), lambda: self.table.insert(self.random.choice(self._stages)))
            else:
                stage = choose.choice(self._stages)
                self.table.rows[self.table.insert(stage)].status = choose.choice(['pending'] * 6 + ['running', 'done'])
        for _ in range(choose.choice([0, 2, 6]) if self._deeds else 0):
            self.after(choose.uniform(0, 4), self._do)
        self._term_at = choose.choice([None, None, choose.uniform(0, 4)])
        self._second_term = choose.random() < 0.2
        self.hasty = choose.random() < 0.2

    def _configure(self, choose, stages):
        lines = ['[pepsi-dispatch]', 'POLL_INTERVAL = %s' % choose.choice(['1 h', '1 h', '1 h', '2 s']),
                 'STATS_INTERVAL = %s' % choose.choice(['0.3 s', '20 s']),
                 'STOP_TIMEOUT = %s' % choose.choice(['0', '0.5 s', '2 s'])]
        for stage in stages:
            lines += ['[stage-%s]' % stage, 'PROGRAM = x', 'PARALLELISM = %d' % choose.choice([1, 1, 2, 3]),
                      'QUEUE_LIMIT = %d' % choose.choice([1, 2, 4]),
                      'MAX_MESSAGES = %d' % choose.choice([0, 1, 3, 1000]),
                      'PACK_BELOW = %s' % choose.choice(['0', '100 ms', '100 ms', '1 s']),
                      'MAX_RUNTIME = %s' % choose.choice(['0.5 s', '2 s', 'forever']),
                      'WORKER_IDLE_TIMEOUT = %s' % choose.choice(['0', '0.3 s', '5 s', 'forever'])]
        return '\n'.join(lines)

    # the run

    def play(self):
        """Turn through the whole history; raises Broken."""
        with silenced(self):
            if self._term_at is None:
                self.run(seconds=4.5)
                if self.dispatcher.exit_code == 0:
                    self._calm_down()
                else:
                    self.run_to_end()
            else:
                self.after(self._term_at, lambda: self.signals.send(signal.SIGTERM))
                if self._second_term:
                    self.after(self._term_at + 0.1, lambda: self.signals.send(signal.SIGTERM))
                self.run(seconds=self._term_at)
                self.run_to_end()
            self._check_end()
            self.close()

    def _calm_down(self):
        """Everybody behaves, and all that can be done gets done without the heartbeat's help."""
        self.calm = True
        self._heal()
        self.table.locked.clear()
        self.table.bad.clear()
        for child in self.children:
            self.after(0.2, lambda child=child: self._put_down(child))
        self.run(until=self._is_quiet, limit_s=120.0)
        # a change of plans: nothing of it may wake it up again
        self.run(seconds=1.5)
        self.stop()

    def _put_down(self, child):
        if child.status is None and child.head() is not None and ('watchdog', child.pid) not in self.dispatcher.timers:
            child.exit(-signal.SIGKILL)

    def _is_quiet(self):
        d = self.dispatcher
        return not (self.queue.busy() or len(d.outbox) or any(p.ready or p.in_flight() for p in d.pools.values())
                    or any(row.status == 'running' or row.status == 'pending' and row.stage in self.config.stages
                           or row.status == 'paused' and row.timeout not in (None, math.inf)
                           for row in self.table.rows.values()))

    def _check_end(self):
        if self.dispatcher.exit_code:
            return
        if self.frozen or self.down or self.lock_held_until > self.now or not self.is_ready():
            return  # the log says what is left, the next start heals it
        if self.table.locked or self.table.bad or self._fates or len(self.dispatcher.outbox):
            if not self.calm:
                return
        running = sorted(id for id, row in self.table.rows.items() if row.status == 'running')
        if running and not self.survivors:
            raise Broken('end: %s are running when it has stopped' % running)
        self.check_counts()

    # children

    def chunk(self):
        return self.random.choice([1, 7, 1000]) if 'in pieces' in self._habits and not self.calm else 65536

    def make_child(self, stage):
        habits = [h for h in self._habits if not self.calm and self.random.random() < 2 * self._rate]
        child = FakeChild(self, stage, self._program_of, 3 if 'narrow pipe' in habits else 65536,
                          'grandchild' in habits)
        child.habits = habits
        child.deaf = 'deaf' in habits
        return child

    def _refusal(self, stage):
        return OSError(errno.ENOENT, 'No such file or directory') if stage in self._refused else None

    def _program_of(self, child):
        habits = child.habits
        yield self.random.choice([0.3, 1.5]) if 'slow start' in habits else 0.002
        if 'stillborn' in habits:
            return 1
        if 'early answer' in habits:
            child.say(b'0 id=0\n', ('bad',))
        mine = collections.deque()
        while True:
            if 'greedy' in habits and not mine:
                while child._in.count(b'\n') or not mine:
                    id = yield READ
                    if id is None:
                        break
                    mine.append(id)
            elif not mine:
                if 'dies idle' in habits and child.handed:
                    self.after(0.3, lambda: child.head() is None and child.exit(3))
                id = yield READ
            if mine:
                id = mine.popleft()
            if id is None:
                break
            self.begin(child, id)
            code = yield from self._act(child, id)
            self.finish(id)
            if code is not None:
                return code
        if 'ignores end of file' in habits:
            while True:
                yield HOUR
        if 'slow exit' in habits:
            yield 0.7
        return 0

    def _act(self, child, id):
        """One pass; returns an exit status, or None to go on."""
        act = self.random.choice(GOOD)
        if self._acts and not self.calm and self.random.random() < self._rate:
            act = self.random.choice(self._acts)
        self.note('child %d: %s', child.pid, act)
        yield 0.3 if act == 'slow' else self.random.choice([0.001, 0.02, 0.05])
        if act == 'crash':
            return -signal.SIGSEGV
        if act == 'exit 0':
            return 0
        if act == 'hang':
            while True:
                yield HOUR
        if act == 'garbage':
            child.say(self.random.choice(GARBAGE), ('bad',))
        elif act == 'overlong':
            child.say(b'1 ' + b'x' * 9000, ('bad',))
        elif act == 'wrong id':
            child.say(b'0 id=%d\n' % (id + 1000), ('bad',))
        elif act == 'close stdout':
            child.close_out()
        elif act == 'half an answer':
            child.say(b'0 id=')
            return 1
        if act in ('garbage', 'overlong', 'wrong id', 'close stdout'):
            while True:
                yield HOUR
        if act == 'fail':
            child.say(b'7 id=%d it is bad\n' % id, ('fail', id, 7))
            return None
        if act != 'unfinished':
            self._write(child, id)
        if act == 'crash after commit':
            return 1
        yield self.random.choice([0.0, 0.001])
        fused = (('x', 0.25),) if act == 'fused' else ()
        self.finish(id)
        child.say(b'0 id=%d%s\n' % (id, b' x=0.25' if fused else b''), ('ok', id, fused))
        if act == 'two answers':
            child.say(b'0 id=%d\n' % id, ('bad',))
            yield HOUR
        return 1 if act == 'crash after answer' else None

    def _write(self, child, id):
        write = 'done'
        if self._writes and not self.calm and self.random.random() < 0.5:
            write = self.random.choice(self._writes)
        values = {'done': {'status': 'done'}, 'advance': {'stage': self.random.choice(self._stages + ['elsewhere'])},
                  'pause': {'status': 'paused', 'timeout': self.now + self.random.choice([-1.0, 0.0, 0.4, 3.0])},
                  'pause for ever': {'status': 'paused', 'timeout': self.random.choice([None, math.inf])},
                  'again': {'status': 'pending'}, 'fail itself': {'status': 'failed'},
                  'other': {'status': 'pending', 'stage': self.random.choice(self._stages)}}
        if write == 'delete':
            self.table.rows.pop(id, None)
        else:
            commit(child, id, values[write])

    # the database

    def latency(self):
        return self.random.choice([0.0005, 0.001, 0.003])

    def slowness(self):
        return 14.0 if 'silent' in self._fates else 12.0 if 'slow' in self._fates else 0.5  # two in a row

    def fate(self, name):
        if self._fates and not self.calm and self.random.random() < 0.15:
            fate = self.random.choice(self._fates)
            self.note('%s: %s', name, fate)
            return ('ok', self.random.uniform(0.3, 4)) if fate == 'slow' else (fate, self.latency())
        return 'ok', self.latency()

    def crowded(self):
        return self.random.random() < 0.7

    def claim_fails(self):
        return 'error' in self._fates and not self.calm and self.random.random() < 0.1

    def _heal(self):
        self._refused.clear()
        self.down = self.lock_held_until = False
        if self.frozen:
            self.frozen = False
            self.queue.snap('reset by peer')

    # the operator

    def _do(self):
        if self.calm:
            return
        deed = self.random.choice(self._deeds)
        ids = sorted(self.table.rows)
        id = self.random.choice(ids) if ids else None
        if self.open_claims and self.random.random() < 0.6:
            id = self.random.choice(sorted(self.open_claims))
        self.note('operator: %s %s', deed, id)
        getattr(self, '_do_' + deed.replace(' ', '_'))(id)

    def _do_insert(self, id):
        for _ in range(self.random.choice([1, 4, 4, 15])):
            stage = self.random.choice(self._stages + ['elsewhere'])
            if self.random.random() < 0.2:
                self.table.insert_late(stage, self.random.choice([0.01, 0.1, 0.9]))
            else:
                self.table.insert(stage)

    def _do_cancel(self, id):
        self.table.update(id, status='failed')

    def _do_delete(self, id):
        self.table.rows.pop(id, None)

    def _do_pause(self, id):
        self.table.update(id, status='paused', timeout=self.now + self.random.choice([-1.0, 0.05, 1.0, math.inf]))

    def _do_requeue(self, id):
        self.table.update(id, status='pending')

    def _do_move(self, id):
        self.table.update(id, stage=self.random.choice(self._stages))

    def _do_lock(self, id):
        self.table.locked[id] = self.now + self.random.choice([0.1, 1.0, 3.0])

    def _do_trigger(self, id):
        self.table.bad[id] = self.now + self.random.choice([0.1, 1.0, 3.0])

    def _do_snap(self, id):
        self.queue.snap()

    def _do_outage(self, id):
        self.down = True
        self.queue.snap()
        self.after(self.random.choice([0.2, 2.0]), self._heal)

    def _do_freeze(self, id):
        self.frozen = True
        self.after(self.random.choice([1.0, 8.0]), self._heal)

    def _do_refuse(self, id):
        self._refused.add(self.random.choice(self._stages))
        self.after(self.random.choice([0.3, 3.0]), self._heal)

    def _do_kill_a_worker(self, id):
        if self.children:
            self.random.choice(self.children).exit(-signal.SIGKILL)

    def _do_stop_the_dispatcher(self, id):
        seconds = self.random.choice([0.3, 10.0])  # SIGSTOP, SIGCONT
        self.now += seconds
        self.stopped_s += seconds
        self._since = {}

    def _do_notify(self, id):
        for _ in range(100):
            self.table.notify()

    def _do_reload(self, id):
        stages = self.random.sample(self._stages + ['d'], self.random.randint(1, len(self._stages)))
        self.reload(self._configure(self.random, sorted(stages)))

    def _do_report(self, id):
        self.signals.send(signal.SIGUSR1)

    def _do_lose_the_lock(self, id):
        self.queue.robbed = True

    def _do_hold_the_lock(self, id):
        self.lock_held_until = self.now + 1.0
        if self.random.random() < 0.3:
            self.table.epoch += 1  # somebody has taken over
        self.queue.snap()


def play(seed, module=pepsidispatch, trace=False):
    """Play the history of a seed. Raises Broken, or whatever the dispatcher raises."""
    History(seed, module, trace).play()


def main(arguments):
    first = int(arguments[0])
    if len(arguments) == 1:
        play(first, trace=True)
        return 0
    failures = 0
    for seed in range(first, int(arguments[1])):
        try:
            play(seed)
        except Exception as e:
            failures += 1
            print('%d %s: %s' % (seed, type(e).__name__, str(e)[:300]))
    print('%d failures' % failures)
    return 1 if failures else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
