#!/usr/bin/env python3
"""pepsi-dispatch: the coordinator of a PEPSI system.

It claims queued messages in PostgreSQL, hands them to persistent workers, and
runs in the foreground until it gets SIGTERM.

Usage:
  pepsi-dispatch [-c FILE] [-v ...] [-q] [--log-json] [run] [--no-wait]
  pepsi-dispatch [-c FILE] [-v ...] [-q] [--log-json] init [--print]
  pepsi-dispatch [-c FILE] [-v ...] [-q] [--log-json] check
  pepsi-dispatch [-c FILE] [-v ...] [-q] [--log-json] status [--watch] [--json | --prometheus]
  pepsi-dispatch [-c FILE] [-v ...] [-q] [--log-json] requeue [--dry-run] (--all | --stage=NAME | ID ...)
  pepsi-dispatch [-c FILE] [-v ...] [-q] [--log-json] sample
  pepsi-dispatch -h | --help
  pepsi-dispatch --version

Commands:
  run          claim and dispatch messages (the default)
  init         create the tables, indexes and triggers that are missing
  check        look for what would keep it from working: configuration, programs, database, rights, plan
  status       show what there is to do, and who does it
  requeue      make failed and timed out messages pending again; ID - reads ids from standard input
  sample       print a commented pepsi.conf and a section for supervisord

Options:
  -c FILE       configuration; else $PEPSI_CONFIG, else /etc/pepsi/pepsi.conf
  -v            log more: -v adds the single steps, -vv the statements
  -q            log less: warnings and errors only
  --log-json    log one JSON object a line
  --no-wait     exit with 75 if another dispatcher holds the lock
  --print       write the SQL to standard output; needs no database
  --watch       look again every 2 s, until Ctrl-C
  --json        one JSON object a line
  --prometheus  the text format of Prometheus
  --dry-run     only say how many
  --all         all that failed or timed out
  --stage=NAME  those of one stage
  -h --help     show this
  --version     show the version
"""
# Design note
# ===========
#
# One process, one thread, one loop, one database connection. A turn of the loop
# (Dispatcher.turn) is
#
#   wait      the only sleep and the only reading of the clock
#   receive   I/O only: what workers wrote, who died, what the database replied, signals -> inbox
#   digest    facts first, then timers that are due: outcomes, freed room, workers to kill or retire
#   hand      give ids to workers by the packing rule, starting workers as needed
#   ask       start the one statement that matters most, if the session is free
#   maintain  retire surplus workers, arm the timers
#
# Three kinds of code: *owners* hold one resource and its state (Child: a process and its pipes;
# Queue: the database session; Signals: the self-pipe; Dispatcher: selector, clock and timers);
# *decisions* are pure (parsing, Pool, Breaker, Outbox, Stats, judge); the Dispatcher moves values
# between the two. Owners never call each other.
#
# The session is asynchronous: a statement is sent in one turn and its reply is a fact of a later
# one. So nothing that the server does (a lock, a lost link, a checkpoint) keeps the loop from
# serving workers, watchdogs and signals, and there is no second loop inside a wait. What stands
# between two statements of one operation is written as a generator that yields statements.
# A notification that comes in one read with a reply is looked for after it: none can be swallowed.
#
# Numbered invariants, referred to below:
#
# I1  A claimed id is in exactly one place: a pool's `ready`, a worker's `inflight`, or the outbox.
#     All three together, and the ids that rest, are *held*: neither claim nor retry takes a held id.
# I2  An id leaves the outbox only when the commit of its outcome is confirmed. An unknown commit
#     is sent again: every write to the queue is guarded by `status = 'running'` and the stage.
# I3  Answers are in order, so an answer belongs to the head of line of its worker. The first line
#     that is not an answer ends the trust in that worker: it is killed and nothing it wrote
#     afterwards is read.
# I4  What a worker wrote is read before anything is judged: a deadline that fired, an exit status.
# I5  Rows that are running and not held belong to nobody. The sweep resets them: after every
#     connect before the first claim, at stop, and at the heartbeat if it is cheap. The lock, the
#     claims and the settlements share one session, so no statement of a lost session can follow.
# I6  A state has one writer. Timers are keys; a timer that fires early looks again and re-arms.
# I7  Every worker is the leader of its own process group, and that group is killed before its
#     leader is reaped: so no number is signalled that could belong to somebody else.
#
# Commits: claims, requeues and retries do not wait for the disk (synchronous_commit off). A worker's
# own durable commit flushes the log past its claim; a claim lost in a server crash leaves the row
# pending, and the id is held. What nobody would write again, `failed` and `timeout`, is durable.
#
# Wake-ups: a notification or the heartbeat has it look for rows. NOTIFY makes those who commit wait
# for one another, so where many do the triggers are told to be silent, and it looks by itself until
# that is over. Two advisory locks see to it that nobody is overlooked: pepsi_dispatch_wake() and
# ALL_HEARD say how.
#
# Under load a statement carries many messages: answers wait for one another (NAP_S, SETTLE_GAP_S)
# while all workers have enough to do and no failure is among them, and a claim waits until half of a
# pool is free.
#
# Glossary: *message* a row; *stage*; *worker* one child process; *pool* the workers of a stage;
# *claim*; *hand* ids to a worker; *head of line* the oldest unanswered id of a worker; *answer* a
# status line; *outcome* what became of an id; *settle* write outcomes; *requeue*, *release* (an id
# that never ran), *reset* (rows found running without an owner), *retry* (paused rows that are due),
# *sweep* (look for rows to reset), *reap* (dead child), *retire* (idle worker), *recycle*,
# *cooldown*, *deadline* (a monotonic instant in seconds). Durations end in `_s`.

import collections
import configparser
import ctypes
import difflib
import enum
import errno
import fcntl
import heapq
import json
import logging
import math
import os
import random
import re
import selectors
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from typing import Any, Callable, Deque, Dict, Generator, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

try:
    import psycopg2
    import psycopg2.extensions
    from docopt import DocoptExit, docopt
except ImportError as _missing:
    sys.stderr.write('pepsi-dispatch: %s; it needs two packages: psycopg2-binary and docopt from PyPI, or '
                     'python3-psycopg2 and python3-docopt from the distribution\n' % _missing)
    sys.exit(78)

__version__ = '1.0.0'

log = logging.getLogger('pepsi-dispatch')
TRACE = 5  # a level below debug: statements
logging.addLevelName(TRACE, 'TRACE')

EXIT_OK, EXIT_FOUND, EXIT_NOT_RUNNING = 0, 1, 1
EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INTERNAL, EXIT_RUNNING, EXIT_CONFIG = 64, 69, 70, 75, 78  # as in sysexits.h

CONFIG_DEFAULT = '/etc/pepsi/pepsi.conf'
CHANNEL = 'ingress'
LOCK_KEY = 0x7065707369  # 'pepsi', the advisory lock of the one dispatcher of a database
SILENT_KEY, HUSH_KEY = LOCK_KEY + 1, LOCK_KEY + 2  # those of the wake-up; see pepsi_dispatch_wake()
FIRST_ID, LAST_ID = -2 ** 63, 2 ** 63 - 1  # of a bigint

LINE_LIMIT = 8192  # bytes of an answer, without its newline
REASON_LIMIT = 1000  # characters of state.dispatch_error
READ_SIZE = 65536  # bytes taken from a pipe at once
DRAIN_LIMIT = 1 << 20  # bytes taken from a dead worker at most: a grandchild may go on writing

LOCK_TIMEOUT_S = 0.2
STATEMENT_TIMEOUT_S = 4.0
SWEEP_TIMEOUT_S = 600.0  # reads the whole table where nothing indexes running rows
REPLY_MARGIN_S = 1.0  # the client's deadline lies this much behind the server's
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = (0.1, 1.6)  # first and longest delay: the first claim follows the server's return within 2 s
FAILURE_S = (0.1, 1.6)  # the same for statements that fail on a living session
LOCK_POLL_S = 0.5  # between two tries for the lock
NO_WAIT_S = 2.0  # how long --no-wait tries: the server may not have noticed yet that the holder died
SKIP_LOCKED_S = 1.0  # how long claims skip locked rows once they met one; then they are looked for again
REPEATS = 5  # of a statement on 40001 and 40P01
DEFER_S = (0.3, 30.0)  # before a row is tried again that could not be written, first and longest: locked, a bad row

DEFERRED_LIMIT = 100  # outcomes that cannot be written before they count towards the rows that may be running
SETTLE_LIMIT = 1000  # outcomes a statement
SETTLE_GAP_S = 0.005  # between two settlements that could as well be one, while more is at work
RETRY_LIMIT = 1000  # paused rows taken at once
RETRY_GAP_S = 0.2  # between two retries, and before a message re-enters its own stage: the floor of a hot loop
LOOK_GAP_S = (0.0125, 0.1)  # after claims that found nothing, before a notification causes the next
THICK, THICK_S = 10, 0.1  # so many notifications within that time may cost those who insert more than looking costs us
HUSH_S = 0.5  # if so, the triggers are silent for so long, and we look by ourselves every LOOK_GAP_S
PEEK_S = 1.0  # the longest time between two looks for those who were silent before others notified again
BELOW_GAP_S = (0.1, 1.0)  # between two claims from the beginning: under an old snapshot they read all dead entries
SWEEP_SHARE = 0.01  # of the time at most goes into sweeps at the heartbeat
SWEEP_AGAIN_S = 1.0  # rows that were locked while they were swept

NAP_LEFT, NAP_S = 4, 0.002  # while each busy worker has so many ids, answers wait for more for this long at most
PROBE_S = 0.1  # a stage of unknown speed shows it on one message; the others wait this long at most
FILL_S = 1.0  # all workers of a slow stage are busy for this long: now ids are queued behind their heads
START_S = 1.0  # a worker that reads nothing for this long is slow, not starting
AVERAGE_WEIGHT = 0.2  # of the latest pass in a stage's average
DEATHS_IN_A_ROW = 3  # without an answer between them, until the stage cools down
COOLDOWN_S = (1.0, 30.0, 300.0)  # first, longest while nobody is blamed, longest while each probe costs a message
EOF_GRACE_S = 1.0  # between the end of a worker's output and its exit
FINISH_S = 2.0  # for the last statements of a stop
SURVIVORS_POLL_S = 0.1
STRANGERS_FIRST_S, STRANGERS_S = 5.0, 3600.0  # when rows of stages without a section are looked for
IDLE_FLUSH_S = 1.0  # statistics are written this long after the last flush when nothing is in flight
LEAST_INTERVAL_S = 0.05  # of heartbeats and flushes, whatever the configuration says: no busy loop
STALL_S = 0.1  # of a turn, beyond which its instant does not stand for the whole of it
LONGEST_WAIT_S = 3600.0  # select() takes no infinity
WATCH_S = 2.0  # between two looks of status --watch
OLD_TRANSACTION_S = 300.0  # check warns of a transaction that holds back vacuum for longer


# -- vocabulary --------------------------------------------------------------------------------------------------------

class Failure(Exception):
    """The operator erred or the environment cannot work: one clear line each, an exit code, no traceback."""

    def __init__(self, code: int, *lines: str) -> None:
        super().__init__('\n'.join(lines))
        self.code = code
        self.lines = lines


class Violation(Exception):
    """A worker wrote what is no answer; the text says what, for `state.dispatch_error`."""


class Unusable(Exception):
    """The database answers but cannot be worked on now: read-only, in recovery."""


class Row(str, enum.Enum):
    """The statuses of a message that the dispatcher writes or tells apart."""
    PENDING = 'pending'
    RUNNING = 'running'
    PAUSED = 'paused'
    FAILED = 'failed'
    TIMEOUT = 'timeout'


# As the database writes them; looked up for each message.
PENDING, RUNNING, PAUSED = Row.PENDING.value, Row.RUNNING.value, Row.PAUSED.value
FAILED = frozenset([Row.FAILED.value, Row.TIMEOUT.value])
IN_PIPELINE = frozenset([PENDING, RUNNING, PAUSED])


class WorkerState(enum.Enum):
    """SERVING -> FINISHING -> LEAVING -> GONE, and KILLED before GONE from any; Worker is the only writer."""
    SERVING = 'serving'  # takes ids
    FINISHING = 'finishing'  # takes none any more: MAX_MESSAGES, a new configuration
    LEAVING = 'leaving'  # its stdin is closed: it answers what it has, then exits
    KILLED = 'killed'  # the group was sent SIGKILL
    GONE = 'gone'  # reaped, pipes closed


class Link(enum.Enum):
    """AWAY -> OPENING -> READY -> AWAY; Queue is the only writer."""
    AWAY = 'away'  # no connection; the next try is due at a deadline
    OPENING = 'opening'  # connecting, settings, lock, epoch, LISTEN
    READY = 'ready'  # the lock is ours on this session


class Phase(enum.Enum):
    """SERVING -> STOPPING -> STOPPED; Dispatcher is the only writer."""
    SERVING = 'serving'
    STOPPING = 'stopping'  # no claim any more; workers are leaving, rows go back
    STOPPED = 'stopped'


class Answer(NamedTuple):
    """A status line: `status` 0 to 255, `fused` (stage, seconds) pairs, `text` the reason of a failure."""
    status: int
    id: Optional[int]
    fused: Tuple[Tuple[str, float], ...]
    text: str


class Outcome(NamedTuple):
    """What became of a claimed id: how its row is written if it is still running at `stage`."""
    id: int
    stage: str
    status: Row  # a row that is running at another stage has advanced and becomes pending whatever stands here
    error: Optional[str] = None  # for state.dispatch_error
    ended: bool = True  # a pass of the stage ended; False: the id never ran
    column: Optional[str] = None  # of stage_stats that counts it
    seconds: float = 0.0  # head of line -> answer, less the fused ones
    fused: Tuple[Tuple[str, float], ...] = ()


class Settled(NamedTuple):
    """What the database says of an outcome: where the row is now. `status` None: it is gone."""
    id: int
    status: Optional[str]
    stage: Optional[str]
    due_s: Optional[float]  # of a paused row
    written: bool  # it was written by this settlement, not found so


class Want(NamedTuple):
    """One stage of a claim: at most `cap` ids, none below `floor`."""
    stage: str
    cap: int
    floor: int


class Doom(NamedTuple):
    """Why we killed a worker, and the id that answers for it, if any."""
    status: Row
    id: Optional[int]
    error: str
    column: Optional[str]


def printable(text: str, limit: int = 200) -> str:
    """Make outside text fit for a log line or a message: no control characters, at most `limit` characters."""
    text = text if len(text) <= limit else text[:limit - 1] + '\u2026'
    return ''.join(c if c.isprintable() else c.encode('unicode_escape', 'backslashreplace').decode('ascii')
                   for c in text)


def one_line(text: str) -> str:
    """Make text fit for `state.dispatch_error`: one line, REASON_LIMIT characters, nothing jsonb or a terminal
    would choke on."""
    text = ''.join(' ' if unicodedata.category(c) in ('Cc', 'Cs', 'Zl', 'Zp') else c for c in text[:4 * REASON_LIMIT])
    return ' '.join(text.split())[:REASON_LIMIT]


def quoted(stage: str) -> str:
    """A stage's name in a log line: as it is, or in double quotes where it has anything but plain characters."""
    return stage if re.match(r'[\w.+/:@-]{1,100}\Z', stage) else '"%s"' % printable(stage).replace('"', '\\"')


def without_section(stages: Sequence[str]) -> str:
    """Say which stages have no section, the first few by name."""
    names = ', '.join(quoted(stage) for stage in stages[:5])
    return ('stage %s, which has no section' % names if len(stages) == 1 else
            '%d stages that have no section: %s%s' % (len(stages), names, ', ...' if len(stages) > 5 else ''))


def native(text: str) -> str:
    """Text as the operating system takes it: UTF-8 bytes whatever the locale says."""
    return os.fsdecode(text.encode('utf-8', 'surrogateescape'))


def brief(seconds: float) -> str:
    """A duration for people: 0.25 s, 5 s, forever."""
    return 'forever' if seconds == math.inf else '%.3g s' % seconds if seconds < 1000 else '%d s' % seconds


# -- configuration: text -> values -------------------------------------------------------------------------------------

class StageConfig(NamedTuple):
    """One [stage-NAME] section, with the defaults filled in. Times in seconds, math.inf for `forever`."""
    name: str
    program: Tuple[str, ...]
    parallelism: int
    queue_limit: int
    max_messages: int  # 0: never recycled
    pack_below_s: float
    max_runtime_s: float
    worker_idle_timeout_s: float


class Config(NamedTuple):
    """A configuration file. Times in seconds, math.inf for `forever`."""
    file: str
    database: str
    poll_interval_s: float
    stats_interval_s: float
    stop_timeout_s: float
    config_file: str
    stages: Dict[str, StageConfig]
    warnings: Tuple[str, ...] = ()
    sources: Tuple[Tuple[str, str, str, str], ...] = ()  # (section, option, text, where it came from), for check -v


_UNITS = {'': 1.0}
for _names, _factor in (('ms msec msecs millisecond milliseconds', 0.001), ('s sec secs second seconds', 1.0),
                        ('min mins minute minutes', 60.0), ('h hr hrs hour hours', 3600.0),
                        ('d day days', 86400.0)):
    _UNITS.update((_name, _factor) for _name in _names.split())


def parse_time(text: str, zero: bool = False, forever: bool = True) -> float:
    """Read a duration and return seconds.

    A number with ms, s, min, h or d, also spelled out, with or without a blank; a bare number is seconds; `forever`
    is math.inf. Raises ValueError that says what would be right.
    """
    match = re.match(r'([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-z]*)\Z', text.strip().lower())
    right = 'a time like 300 s, 250 ms, 5 min, 1.5 h or 1 d' + (', or forever' if forever else '')
    if text.strip().lower() == 'forever' and forever:
        return math.inf
    if not match or match.group(2) not in _UNITS:
        raise ValueError(right)
    seconds = float(match.group(1)) * _UNITS[match.group(2)]
    if seconds == math.inf or (seconds == 0 and not zero):
        raise ValueError(('less: ' if seconds else 'more than 0: ') + right)
    return seconds


def parse_count(text: str, least: int = 0, most: Optional[int] = None) -> int:
    """Read a whole number from `least` to `most`. Raises ValueError that says what would be right."""
    if re.match(r'[0-9]{1,9}\Z', text.strip()):
        number = int(text)
        if least <= number and (most is None or number <= most):
            return number
    raise ValueError('a whole number from %d to %s' % (least, 999999999 if most is None else most))


def parse_program(text: str) -> Tuple[str, ...]:
    """Split PROGRAM as a shell would. Raises ValueError that says what would be right."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise ValueError('a program and its arguments, quoted as in a shell (%s)' % e) from None
    if not words or not words[0] or '\0' in text:
        raise ValueError('a program and its arguments, quoted as in a shell')
    return tuple(words)


def parse_database(text: str) -> str:
    """Check a libpq URI or keyword string. Raises ValueError, without the value: it may hold a password."""
    try:
        psycopg2.extensions.parse_dsn(text)
    except psycopg2.Error:
        raise ValueError('a libpq URI (postgresql://host/name) or keyword string (host=... dbname=...)') from None
    return text


class Option(NamedTuple):
    """A line of the table of options: what parses it, its default as it would be written, and what it is for."""
    name: str
    default: Optional[str]  # None: required
    parse: Callable[[str], Any]
    about: str


_time = parse_time
OPTIONS = {
    'pepsi': (
        Option('DATABASE', '', parse_database, "libpq URI or keyword string; empty: libpq's PG* variables"),
    ),
    'pepsi-dispatch': (
        Option('MAX_RUNTIME', '300 s', _time, 'head-of-line watchdog'),
        Option('WORKER_IDLE_TIMEOUT', '5 s', lambda t: _time(t, zero=True), 'a surplus worker is stopped after this'),
        Option('POLL_INTERVAL', '30 s', _time, 'heartbeat: look even if nothing was heard'),
        Option('STATS_INTERVAL', '60 s', _time, 'between two writes of the statistics'),
        Option('STOP_TIMEOUT', '5 s', lambda t: _time(t, zero=True, forever=False),
               'grace for workers to leave before SIGKILL'),
        Option('CONFIG_FILE', '', str, 'what workers get with -c; empty: the absolute path of this file'),
    ),
    'stage-': (
        Option('PROGRAM', None, parse_program, 'what is started as PROGRAM worker -c CONFIG_FILE'),
        Option('PARALLELISM', '4', lambda t: parse_count(t, 0, 10000), 'workers at most; 0 holds the stage'),
        Option('QUEUE_LIMIT', '4', lambda t: parse_count(t, 1, 1000), 'ids pipelined to one worker at once'),
        Option('MAX_MESSAGES', '1000', parse_count, 'ids after which a worker is recycled; 0: never'),
        Option('PACK_BELOW', '100 ms', lambda t: _time(t, zero=True),
               'pack behind one another only while passes take less on average'),
        Option('MAX_RUNTIME', '', _time, 'instead of the one in [pepsi-dispatch]'),
        Option('WORKER_IDLE_TIMEOUT', '', lambda t: _time(t, zero=True), 'instead of the one in [pepsi-dispatch]'),
    ),
}  # type: Dict[str, Tuple[Option, ...]]


def nearest(word: str, known: Iterable[str]) -> str:
    """', nearest is X' for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), 1, 0.7)
    return ', the nearest known one is %s' % close[0] if close else ''


def parse_config(text: str, file: str) -> Config:
    """Turn the text of a pepsi.conf into a Config, warnings included.

    Pure: reads nothing else. `file` is its path, for messages and as the default of CONFIG_FILE. Raises Failure
    (EXIT_CONFIG) with one line for every error.
    """
    parser = configparser.RawConfigParser(strict=True, default_section='\n', comment_prefixes=('#', ';'),
                                          empty_lines_in_values=False)
    errors: List[str] = []
    warnings: List[str] = []
    read: Dict[str, Dict[str, Any]] = {}  # values by section
    raw: Dict[Tuple[str, str], str] = {}  # texts by section and option
    try:
        parser.read_string(text[1:] if text.startswith('\ufeff') else text, source=file)
    except configparser.MissingSectionHeaderError as e:
        raise Failure(EXIT_CONFIG, '%s: line %d: neither a [section] nor a comment, and before the first '
                      '[section]' % (file, e.lineno)) from None
    except configparser.DuplicateSectionError as e:
        raise Failure(EXIT_CONFIG, '%s: line %s: section [%s] stands there a second time'
                      % (file, e.lineno, printable(e.section))) from None
    except configparser.DuplicateOptionError as e:
        raise Failure(EXIT_CONFIG, '%s: line %s: [%s] %s stands there a second time'
                      % (file, e.lineno, printable(e.section), printable(e.option.upper()))) from None
    except configparser.ParsingError as e:
        raise Failure(EXIT_CONFIG, *['%s: line %d: neither [section] nor OPTION = value' % (file, number)
                                     for number, _ in e.errors]) from None
    for section in parser.sections():
        kind, stage = ('stage-', section[6:]) if section.startswith('stage-') else (section, '')
        shown = printable(section)
        if section.upper() == 'DEFAULT':
            errors.append('%s: [%s] is not known here: write options into [pepsi-dispatch] or a stage' % (file, shown))
            continue
        if kind == 'stage-' and (not stage.strip() or stage == 'id' or not stage.isprintable()):
            errors.append("%s: [%s]: a stage needs a name of printable characters other than 'id'" % (file, shown))
            continue
        if kind not in OPTIONS:
            neighbour = section.startswith('pepsi-')
            hint = nearest(section, ['pepsi-dispatch'] if neighbour else ['pepsi', 'pepsi-dispatch', 'stage-NAME'])
            if section.lower() in OPTIONS or re.match(r'(?i)stage[\s_:.-]', section):
                right = section.lower() if section.lower() in OPTIONS else 'stage-' + section[6:].strip()
                warnings.append('%s: unknown section [%s]: write [%s]' % (file, shown, printable(right)))
            elif hint or not neighbour:
                warnings.append('%s: unknown section [%s]%s' % (file, shown, hint or ', known are [pepsi], '
                                                                '[pepsi-dispatch] and [stage-NAME]'))
            continue
        values = read[section] = {}
        known = {option.name: option for option in OPTIONS[kind]}
        for name, value in parser.items(section):
            name = name.upper()
            if name not in known:
                where = [other for other in OPTIONS if name in {option.name for option in OPTIONS[other]}]
                warnings.append('%s: [%s] unknown option %s%s' % (
                    file, shown, printable(name), ', it belongs into [%s]' % (
                        where[0] + 'NAME' if where[0] == 'stage-' else where[0]) if where else nearest(name, known)))
                continue
            continued = [word for line in value.split('\n')[1:] for word in re.findall(r'^\s*(\w+)\s*[=:]', line)
                         if word.upper() in known]
            if continued:
                errors.append('%s: [%s] %s continues %s, since it is indented: begin it at the margin'
                              % (file, shown, continued[0].upper(), name))
                continue
            try:
                values[name] = known[name].parse(value)
                raw[section, name] = value
            except ValueError as e:
                given = '(not shown: it may hold a password)' if name == 'DATABASE' else "= '%s'" % printable(value)
                errors.append('%s: [%s] %s %s is wrong: it must be %s' % (file, shown, name, given, e))
            if name == 'PROGRAM' and any(word[:1] in ('#', ';') for word in values.get(name, ())):
                warnings.append('%s: [%s] PROGRAM has a # or ; in it, which begins a comment on a line of its own only'
                                % (file, shown))
        errors.extend('%s: [%s] %s is missing: %s' % (file, shown, option.name, option.about)
                      for option in OPTIONS[kind] if option.default is None and option.name not in
                      (name.upper() for name in parser.options(section)))
    if errors:
        raise Failure(EXIT_CONFIG, *(errors + warnings))

    def effective(section: str, *fallbacks: str) -> Dict[str, Any]:
        values: Dict[str, Any] = {}
        for kind in fallbacks:
            values.update((o.name, o.parse(o.default)) for o in OPTIONS[kind] if o.default)
            values.update(read.get(kind, {}))
        values.update(read.get(section, {}))
        return values

    stages = {}
    for section in read:
        if section.startswith('stage-'):
            v = effective(section, 'pepsi-dispatch', 'stage-')
            stages[section[6:]] = StageConfig(
                section[6:], v['PROGRAM'], v['PARALLELISM'], v['QUEUE_LIMIT'], v['MAX_MESSAGES'], v['PACK_BELOW'],
                v['MAX_RUNTIME'], v['WORKER_IDLE_TIMEOUT'])
    if not stages:
        warnings.append('%s: no [stage-NAME] section: nothing will be dispatched' % file)
    v = effective('pepsi-dispatch', 'pepsi-dispatch')
    return Config(file, read.get('pepsi', {}).get('DATABASE', ''), v['POLL_INTERVAL'], v['STATS_INTERVAL'],
                  v['STOP_TIMEOUT'], v.get('CONFIG_FILE') or os.path.abspath(file), stages, tuple(warnings),
                  tuple(origins(file, stages, raw)))


def default_of(option: Option) -> str:
    """The text of an option's default; an override of a stage has that of the general one."""
    general = {o.name: o for o in OPTIONS['pepsi-dispatch']}.get(option.name, option)
    return option.default or general.default or ''


def origins(file: str, stages: Iterable[str],
            raw: Dict[Tuple[str, str], str]) -> Iterable[Tuple[str, str, str, str]]:
    """Yield (section, option, text, where it came from) for every option that is in force; no password among them."""
    for section in ['pepsi', 'pepsi-dispatch'] + ['stage-' + stage for stage in stages]:
        for option in OPTIONS['stage-' if section.startswith('stage-') else section]:
            if (section, option.name) in raw:
                text, source = raw[section, option.name], file
            elif ('pepsi-dispatch', option.name) in raw:
                text, source = raw['pepsi-dispatch', option.name], '[pepsi-dispatch]'
            else:
                text, source = default_of(option), 'default'
            if option.name == 'DATABASE' and text:
                words = psycopg2.extensions.parse_dsn(text)
                text = ' '.join('%s=%s' % (key, '********' if 'password' in key else words[key]) for key in words)
            yield section, option.name, text, source


def difference(old: StageConfig, new: StageConfig) -> str:
    """Say for the log which options of a stage have changed, and how."""
    def show(value: Any) -> str:
        return ' '.join(map(shlex.quote, value)) if isinstance(value, tuple) else \
            brief(value) if isinstance(value, float) else str(value)

    changes = ['%s %s -> %s' % (name.upper()[:-2] if name.endswith('_s') else name.upper(), show(a), show(b))
               for name, a, b in zip(old._fields, old, new) if a != b]
    return printable('; '.join(changes) or 'CONFIG_FILE', 500)


def load_config(path: Optional[str]) -> Config:
    """Read the file named by -c, $PEPSI_CONFIG or the default path. Raises Failure (EXIT_CONFIG)."""
    source = '' if path else ' (named by $PEPSI_CONFIG)' if os.environ.get('PEPSI_CONFIG') else ' (the default)'
    path = path or os.environ.get('PEPSI_CONFIG') or CONFIG_DEFAULT
    try:
        with open(path, encoding='utf-8') as f:
            return parse_config(f.read(), path)
    except OSError as e:
        hint = '; name it with -c or $PEPSI_CONFIG; pepsi-dispatch sample prints one' if 'default' in source else ''
        raise Failure(EXIT_CONFIG, 'cannot read %s%s: %s%s' % (path, source, e.strerror, hint)) from None
    except UnicodeDecodeError as e:
        raise Failure(EXIT_CONFIG, '%s: not UTF-8 text: byte %d' % (path, e.start)) from None


# -- SQL ---------------------------------------------------------------------------------------------------------------

# init, in one transaction; every part is left alone where it is there already.
SCHEMA = """\
-- What pepsi-dispatch needs. Run again at will: what is there is left alone.
SELECT pg_advisory_xact_lock(%(key)d, 1);

CREATE TABLE IF NOT EXISTS queue (
    ingress_id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    stage      text NOT NULL,
    status     text NOT NULL DEFAULT 'pending'
               CHECK (status IN ('pending', 'running', 'paused', 'done', 'failed', 'timeout')),
    timeout    timestamptz,
    state      jsonb NOT NULL DEFAULT '{}'
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05,
        autovacuum_vacuum_insert_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS queue_pending ON queue (stage, ingress_id) WHERE status = 'pending';
CREATE INDEX IF NOT EXISTS queue_paused ON queue (timeout) WHERE status = 'paused';
-- For the look for rows without an owner at every start, and for status: without it they read the whole table. Note:
-- upper() hides it from everybody else. A worker's UPDATE ... WHERE ingress_id = 5 AND status = 'running' would take a
-- plain one for cheaper than the primary key, and read the entries of all that ever ran.
CREATE INDEX IF NOT EXISTS queue_unfinished ON queue (upper(status), stage)
    WHERE upper(status) IN ('RUNNING', 'FAILED', 'TIMEOUT');

CREATE TABLE IF NOT EXISTS stage_stats (
    stage              text PRIMARY KEY,
    processed          bigint NOT NULL DEFAULT 0,
    failed             bigint NOT NULL DEFAULT 0,
    timeouts           bigint NOT NULL DEFAULT 0,
    crashes            bigint NOT NULL DEFAULT 0,
    processing_seconds double precision NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS dispatch_stats (
    stages   bigint NOT NULL DEFAULT 0,
    messages bigint NOT NULL DEFAULT 0,
    epoch    bigint NOT NULL DEFAULT 0,
    flush    bigint NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS dispatch_stats_single_row ON dispatch_stats ((true));
INSERT INTO dispatch_stats DEFAULT VALUES ON CONFLICT DO NOTHING;

-- A notification serialises the commits of all who send one. Where they come thick the dispatcher takes lock %(hush)d
-- and looks by itself: then nobody sends any. Who may be silent holds lock %(silent)d, shared, until the end of the
-- transaction: the dispatcher gets it, before it waits for notifications again, when none of them is still to commit.
CREATE OR REPLACE FUNCTION pepsi_dispatch_wake() RETURNS trigger LANGUAGE plpgsql AS $wake$
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared(%(silent)d)
       OR pg_try_advisory_lock_shared(%(hush)d) AND pg_advisory_unlock_shared(%(hush)d) THEN
        PERFORM pg_notify('ingress', '');
    END IF;
    RETURN NULL;
END
$wake$;
DO $init$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'queue'::regclass AND tgname = 'pepsi_dispatch_insert') THEN
        CREATE TRIGGER pepsi_dispatch_insert AFTER INSERT ON queue
            FOR EACH STATEMENT EXECUTE FUNCTION pepsi_dispatch_wake();
    END IF;
    -- Not for a worker's update of its running row, nor for the dispatcher's own.
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'queue'::regclass AND tgname = 'pepsi_dispatch_update') THEN
        CREATE TRIGGER pepsi_dispatch_update AFTER UPDATE OF status, stage, timeout ON queue
            FOR EACH ROW WHEN (
                NEW.status IN ('pending', 'paused') AND OLD.status <> 'running'
                AND (NEW.status <> OLD.status OR NEW.stage <> OLD.stage OR NEW.timeout IS DISTINCT FROM OLD.timeout)
                AND current_setting('pepsi.dispatcher', true) IS DISTINCT FROM 'on')
            EXECUTE FUNCTION pepsi_dispatch_wake();
    END IF;
END
$init$;
""" % {'key': LOCK_KEY & 0x7fffffff, 'silent': SILENT_KEY, 'hush': HUSH_KEY}

# Shown by init --print: roles are the operator's business.
GRANTS = """
-- Whoever inserts needs what everybody may do, unless that was revoked: EXECUTE on pg_notify and on the functions whose
-- names contain advisory.
-- The dispatcher's role needs no more than this (put its name for ROLE):
--   GRANT USAGE ON SCHEMA public TO ROLE;
--   GRANT SELECT (ingress_id, stage, status, timeout, state), UPDATE (status, state) ON queue TO ROLE;
--   GRANT SELECT, INSERT, UPDATE ON stage_stats, dispatch_stats TO ROLE;
"""

# First on every connection; names that this server does not know are passed over. The planner's switches keep
# the claim on its partial index in every state of the statistics; `pepsi.dispatcher` mutes our own triggers.
SETTINGS = """
SELECT set_config(s.name, s.value, false)
FROM unnest(%(names)s::text[], %(values)s::text[]) AS s(name, value)
WHERE s.name LIKE '%%.%%' OR s.name IN (SELECT name FROM pg_settings)
"""
SESSION = {
    'statement_timeout': '%dms' % (STATEMENT_TIMEOUT_S * 1000),
    'lock_timeout': '%dms' % (LOCK_TIMEOUT_S * 1000),
    'idle_session_timeout': '0',
    'idle_in_transaction_session_timeout': '30s',
    'default_transaction_isolation': 'read committed',
    'default_transaction_deferrable': 'off',
    'client_min_messages': 'warning',
    'tcp_keepalives_idle': '5', 'tcp_keepalives_interval': '3', 'tcp_keepalives_count': '3',
    'tcp_user_timeout': '12s',
    'DateStyle': 'ISO', 'IntervalStyle': 'postgres', 'bytea_output': 'hex',
    'jit': 'off', 'enable_seqscan': 'off', 'enable_bitmapscan': 'off', 'enable_hashjoin': 'off',
    'enable_mergejoin': 'off', 'enable_sort': 'off', 'enable_incremental_sort': 'off',
    'max_parallel_workers_per_gather': '0',
    'pepsi.dispatcher': 'on',
}

# Second: can this database be worked on, and which one is it?
CONDITION = """
SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', current_setting('synchronous_commit'),
       concat_ws('/', inet_server_port(), (SELECT oid FROM pg_database WHERE datname = current_database()),
                 'dispatch_stats'::regclass::oid)
"""
# Two clusters may agree in all that; this one may be forbidden on hosted servers.
CLUSTER = 'SELECT system_identifier::text FROM pg_control_system()'

# Third, at start only: are the tables there, with the columns and types that the statements below need?
TABLES = """
SELECT (SELECT (q.ingress_id::bigint, q.stage = ''::text, q.status = ''::text, q.timeout < now(),
                jsonb_typeof(q.state))::text
        FROM queue AS q WHERE false),
       (SELECT (s.stage, s.processed, s.failed, s.timeouts, s.crashes, s.processing_seconds)::text
        FROM stage_stats AS s WHERE false),
       (SELECT count(*) FROM (SELECT d.stages, d.messages, d.epoch, d.flush FROM dispatch_stats AS d) AS d)
"""

# Tried in a patient loop, never the blocking form: that would hold a snapshot while it waits.
LOCK = 'SELECT pg_try_advisory_lock(%(key)s)'

# Who has it; and, after a reconnect, whether that one has taken over from us.
HOLDER = """
SELECT l.pid, a.application_name, a.client_addr::text, to_char(a.backend_start, 'YYYY-MM-DD HH24:MI:SS TZ'),
       (SELECT max(epoch) FROM dispatch_stats)
FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.classid::bigint = %(key)s >> 32 AND l.objid::bigint = %(key)s & 4294967295
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# For a session that we lost and the server has not: it would keep the lock until its keepalives fail.
TERMINATE = 'SELECT pg_terminate_backend(%(pid)s)'

# In a transaction of its own after the lock and LISTEN: does the session keep them? Behind a transaction pooler not.
KEPT = """
SELECT EXISTS (SELECT FROM pg_locks AS l
               WHERE l.locktype = 'advisory' AND l.granted AND l.pid = pg_backend_pid()
                 AND l.classid::bigint = %(key)s >> 32 AND l.objid::bigint = %(key)s & 4294967295)
       AND EXISTS (SELECT FROM pg_listening_channels() AS c WHERE c = %(channel)s),
       pg_backend_pid()
"""

# Behind a pooler the lock would stay with the server's session for the next who gets it.
UNLOCK = 'SELECT pg_advisory_unlock_all()'

# Once a life, under the lock: fences off every earlier dispatcher. Durable.
TAKE_OVER = 'UPDATE dispatch_stats SET epoch = epoch + 1 RETURNING epoch, flush'
# After every reconnect, under the lock: is it still ours?
EPOCH = 'SELECT epoch, flush FROM dispatch_stats'
LISTEN = 'LISTEN ' + CHANNEL
RELAX = 'SET synchronous_commit = off'

# Under the lock, after the sweep, while some stage has room and a reason to look. Sets only rows running that are
# pending in the very moment, of the stages asked for, never more than the cap: the ids are fixed before the update.
# `stage = ANY (ARRAY[...])` with ORDER BY stage, ingress_id is an order that no index but the partial one serves. By
# id, not by place: a row that somebody touched while we waited for its lock is claimed all the same. Rows that were
# moved between two stages in that moment are told by RETURNING.
# Note: `|| ''` hides the guards of the target from the planner. A bare `status = 'pending'` proves the partial index
# usable there, too; where the statistics know of no pending row that looks cheaper than a few keys, and it reads the
# whole index (2.7 s at 1,000,000 rows).
CLAIM = """
UPDATE queue
SET status = 'running'
WHERE ingress_id = ANY (ARRAY(
    SELECT p.ingress_id
    FROM unnest(%(stages)s::text[], %(caps)s::bigint[], %(floors)s::bigint[]) AS s(stage, cap, floor),
    LATERAL (
        SELECT q.ingress_id
        FROM queue AS q
        WHERE q.stage = ANY (ARRAY[s.stage])
          AND q.status = 'pending'
          AND q.ingress_id >= s.floor
          AND q.ingress_id <> ALL (%(held)s::bigint[])
        ORDER BY q.stage, q.ingress_id
        LIMIT s.cap
    ) AS p))
  AND status || '' = 'pending'
  AND stage || '' = ANY (%(stages)s::text[])
RETURNING ingress_id, stage
"""
# For a while after a claim met a locked row.
CLAIM_SKIPPING = CLAIM.replace('LIMIT s.cap', 'LIMIT s.cap\n        FOR UPDATE SKIP LOCKED')

# Under the lock, for ids in the outbox. Guard: still running; a row at another stage has advanced and is requeued.
# Returns the rows as they were found, then as they were written; a row that was found running and not written is
# locked or was changed by somebody this moment: it is sent again. A row in neither list is gone. Locks in id order.
SETTLE = """
WITH found AS MATERIALIZED (
    SELECT o.id, o.stage AS claimed, o.status AS verdict, o.error, q.stage, q.status,
           CASE WHEN q.status = 'paused' AND q.timeout < 'infinity'
                THEN least(extract(epoch FROM greatest(q.timeout, now()) - now())::float8, 1e9) END AS due_s
    FROM unnest(%(ids)s::bigint[], %(stages)s::text[], %(verdicts)s::text[], %(errors)s::text[])
         AS o(id, stage, status, error)
    JOIN queue AS q ON q.ingress_id = o.id
), written AS (
    UPDATE queue AS q
    SET status = CASE WHEN q.stage = f.claimed THEN f.verdict ELSE 'pending' END,
        state = CASE WHEN f.error IS NULL OR q.stage IS DISTINCT FROM f.claimed THEN q.state
                     WHEN q.state IS NULL THEN jsonb_build_object('dispatch_error', f.error)
                     WHEN jsonb_typeof(q.state) = 'object'
                     THEN q.state || jsonb_build_object('dispatch_error', f.error)
                     ELSE q.state END
    FROM found AS f
    WHERE f.status = 'running' AND q.ingress_id = f.id AND q.status || '' = 'running'
    RETURNING q.ingress_id, q.status, q.stage
)
SELECT id, status, stage, due_s,
       CASE WHEN status = 'running' THEN set_config('synchronous_commit', %(durable)s, true) ELSE '' END
FROM found
UNION ALL
SELECT ingress_id, status, stage, NULL, NULL FROM written
"""
# For a while after a settlement met a locked row.
SETTLE_SKIPPING = SETTLE.replace(
    'FROM found AS f\n', """FROM (
        SELECT f.*
        FROM found AS f
        JOIN queue AS q ON q.ingress_id = f.id
        WHERE f.status = 'running'
        FOR UPDATE OF q SKIP LOCKED
    ) AS f
""")

# Once a session: what is sent for each batch is planned once. A generic plan is right for all three, in every state of
# the statistics, but cannot hash the held ids: beyond PREPARED_HELD of them the claim is sent as text. `exchange` is
# a settlement and a claim in one statement: they never touch the same row, since what is settled is held.
_SETTLE = SETTLE % {'ids': '$1', 'stages': '$2', 'verdicts': '$3', 'errors': '$4', 'durable': '$5'}
PREPARE = """
SET plan_cache_mode = force_generic_plan;
PREPARE claim (text[], bigint[], bigint[], bigint[]) AS %s;
PREPARE settle (bigint[], text[], text[], text[], text) AS %s;
PREPARE exchange (bigint[], text[], text[], text[], text, text[], bigint[], bigint[], bigint[]) AS %s
UNION ALL
SELECT ingress_id, 'claimed', stage, -1, NULL FROM claimed
""" % (CLAIM % {'stages': '$1', 'caps': '$2', 'floors': '$3', 'held': '$4'}, _SETTLE, _SETTLE.replace(
    '\n)\nSELECT id,', '\n), claimed AS (%s)\nSELECT id,'
    % (CLAIM % {'stages': '$6', 'caps': '$7', 'floors': '$8', 'held': '$9'})))
PREPARED_CLAIM = 'EXECUTE claim (%(stages)s, %(caps)s, %(floors)s, %(held)s)'
PREPARED_SETTLE = 'EXECUTE settle (%(ids)s, %(stages)s, %(verdicts)s, %(errors)s, %(durable)s)'
PREPARED_EXCHANGE = """
EXECUTE exchange (%(ids)s, %(stages)s, %(verdicts)s, %(errors)s, %(durable)s,
                  %(wanted)s, %(caps)s, %(floors)s, %(held)s)
"""
PREPARED_HELD = 1000

# Under the lock. Flips paused rows that are due; with `sweep` also resets rows running without an owner, which reads
# the whole table, and looks whether the lock is still ours. Skips what is locked and tells how many, to come back.
# Returns (what, stage, rows, next_due_s). Note: `|| ''` as in CLAIM, upper() for the index queue_unfinished.
REVIVE = """
WITH lost AS MATERIALIZED (
    SELECT q.ingress_id
    FROM queue AS q
    WHERE %(sweep)s AND upper(q.status) = 'RUNNING' AND q.status || '' = 'running'
      AND q.ingress_id <> ALL (%(held)s::bigint[])
), reset AS (
    UPDATE queue
    SET status = 'pending'
    WHERE ingress_id = ANY (ARRAY(
        SELECT q.ingress_id
        FROM queue AS q
        WHERE q.ingress_id = ANY (ARRAY(SELECT ingress_id FROM lost)) AND q.status || '' = 'running'
        FOR UPDATE SKIP LOCKED))
      AND status || '' = 'running'
    RETURNING stage
), ripe AS MATERIALIZED (
    SELECT q.ingress_id
    FROM queue AS q
    WHERE q.status = 'paused' AND q.timeout <= now() AND q.ingress_id <> ALL (%(held)s::bigint[])
    ORDER BY q.timeout
    LIMIT %(limit)s
), retried AS (
    UPDATE queue
    SET status = 'pending'
    WHERE ingress_id = ANY (ARRAY(
        SELECT q.ingress_id
        FROM queue AS q
        WHERE q.ingress_id = ANY (ARRAY(SELECT ingress_id FROM ripe)) AND q.status || '' = 'paused'
        FOR UPDATE SKIP LOCKED))
      AND status || '' = 'paused' AND coalesce(timeout, 'infinity') <= now()
    RETURNING stage
)
SELECT 'lock', NULL, count(*), NULL::float8
FROM pg_locks AS l
WHERE %(sweep)s AND l.locktype = 'advisory' AND l.granted AND l.pid = pg_backend_pid()
  AND l.classid::bigint = %(key)s >> 32 AND l.objid::bigint = %(key)s & 4294967295
UNION ALL
SELECT 'reset', stage, count(*), NULL FROM reset GROUP BY stage
UNION ALL
SELECT 'retried', stage, count(*), NULL FROM retried GROUP BY stage
UNION ALL
SELECT 'lost', NULL, count(*), NULL FROM lost
UNION ALL
SELECT 'ripe', NULL, count(*), NULL FROM ripe
UNION ALL
SELECT 'next', NULL, 0, (
    SELECT least(extract(epoch FROM q.timeout - now())::float8, 1e9)
    FROM queue AS q
    WHERE q.status = 'paused' AND q.timeout > now() AND q.timeout < 'infinity'
      AND q.ingress_id <> ALL (%(held)s::bigint[])
    ORDER BY q.timeout
    LIMIT 1)
"""

# The same with `sweep`: more than one statement at once is one transaction, and the reply is that of the last. With
# the ordinary time limit, so that a silent link is noticed as soon as ever; without it where the server says that it
# takes longer, on a large table without the index queue_unfinished.
SWEEP = 'SET LOCAL enable_seqscan = on;' + REVIVE
LONG_SWEEP = 'SET LOCAL statement_timeout = %d;' % (SWEEP_TIMEOUT_S * 1000) + SWEEP

# After REVIVE failed because of a row: which ones it would write, and one of them alone.
REVIVABLE = """
SELECT q.ingress_id, q.status
FROM queue AS q
WHERE %(sweep)s AND upper(q.status) = 'RUNNING' AND q.ingress_id <> ALL (%(held)s::bigint[])
UNION ALL
(SELECT q.ingress_id, q.status
 FROM queue AS q
 WHERE q.status = 'paused' AND q.timeout <= now() AND q.ingress_id <> ALL (%(held)s::bigint[])
 ORDER BY q.timeout
 LIMIT %(limit)s)
"""
REVIVE_ONE = """
UPDATE queue
SET status = 'pending'
WHERE ingress_id = %(id)s AND status || '' = %(status)s AND (status || '' = 'running' OR timeout <= now())
"""
# After CLAIM failed because of a row: the first one that it would write.
FIRST_PENDING = """
SELECT q.ingress_id
FROM queue AS q
WHERE q.stage = ANY (ARRAY[%(stage)s]) AND q.status = 'pending' AND q.ingress_id >= %(floor)s
  AND q.ingress_id <> ALL (%(held)s::bigint[])
ORDER BY q.stage, q.ingress_id
LIMIT 1
"""

# Under the lock. Adds a sealed batch once, however often it is sent: guarded by the epoch and the flush number.
# Returns the new number, if it was added now, and the epoch and number that were there before.
FLUSH = """
WITH fence AS (
    UPDATE dispatch_stats
    SET stages = stages + %(total)s, messages = messages + %(messages)s, flush = %(flush)s
    WHERE epoch = %(epoch)s AND flush < %(flush)s
    RETURNING flush
), added AS (
    INSERT INTO stage_stats AS s (stage, processed, failed, timeouts, crashes, processing_seconds)
    SELECT a.*
    FROM unnest(%(stages)s::text[], %(processed)s::bigint[], %(failed)s::bigint[], %(timeouts)s::bigint[],
                %(crashes)s::bigint[], %(seconds)s::float8[]) AS a
    WHERE EXISTS (SELECT FROM fence)
    ON CONFLICT (stage) DO UPDATE
    SET processed = s.processed + excluded.processed,
        failed = s.failed + excluded.failed,
        timeouts = s.timeouts + excluded.timeouts,
        crashes = s.crashes + excluded.crashes,
        processing_seconds = s.processing_seconds + excluded.processing_seconds
)
SELECT (SELECT flush FROM fence), epoch, flush FROM dispatch_stats
"""

# Have those who insert be silent, if one of them waits for another right now: for the lock that NOTIFY takes at commit.
# Not waiting for ours: they would be silent while we wait.
CROWDED = """EXISTS (SELECT FROM pg_locks
                    WHERE NOT granted AND locktype = 'object' AND classid = 'pg_database'::regclass AND objid = 0)"""
HUSH = 'SELECT CASE WHEN %s THEN pg_try_advisory_lock(%d) ELSE false END' % (CROWDED, HUSH_KEY)
# Is nobody silent who is still to commit? While it is asked all others notify. With CALL, have all notify again in that
# same transaction. Trying, not waiting: as long as messages come thick somebody always is.
ALL_HEARD = 'SELECT pg_try_advisory_xact_lock(%d)' % SILENT_KEY
CALL = """
SELECT CASE WHEN pg_try_advisory_xact_lock(%d) THEN pg_advisory_unlock(%d) IS NOT NULL ELSE false END
""" % (SILENT_KEY, HUSH_KEY)

# Stages that have pending rows and no section. A loose index scan: one look for each stage, not one for each row.
STRANGERS = """
WITH RECURSIVE found(stage) AS (
    (SELECT q.stage FROM queue AS q WHERE q.status = 'pending' ORDER BY q.stage LIMIT 1)
    UNION ALL
    SELECT (
        SELECT q.stage FROM queue AS q WHERE q.status = 'pending' AND q.stage > f.stage ORDER BY q.stage LIMIT 1)
    FROM found AS f
    WHERE f.stage IS NOT NULL
)
SELECT stage FROM found WHERE stage IS NOT NULL AND stage <> ALL (%(stages)s::text[]) LIMIT 100
"""

# requeue: which rows, and how.
REQUEUED = """
upper(status) IN ('FAILED', 'TIMEOUT')
  AND (%(every)s OR stage = %(stage)s OR ingress_id = ANY (%(ids)s::bigint[]))
"""
REQUEUE = """
UPDATE queue
SET status = 'pending',
    state = CASE WHEN jsonb_typeof(state) = 'object' THEN state - 'dispatch_error' ELSE state END
WHERE """ + REQUEUED + """
RETURNING ingress_id
"""

# status: each part by the partial index that holds just its rows.
STATUS_ROWS = """
SELECT stage, 'pending', count(*) FROM queue WHERE status = 'pending' GROUP BY stage
UNION ALL
SELECT stage, 'paused', count(*) FROM queue WHERE status = 'paused' GROUP BY stage
UNION ALL
SELECT stage, lower(upper(status)), count(*)
FROM queue
WHERE upper(status) IN ('RUNNING', 'FAILED', 'TIMEOUT')
GROUP BY stage, upper(status)
"""
STATUS_COUNTERS = 'SELECT stage, processed, failed, timeouts, crashes, processing_seconds FROM stage_stats'
# A row has no time of its own; the server knows when it was written if it tracks that.
STATUS_OLDEST = """
SELECT s.stage, (
    SELECT CASE WHEN current_setting('track_commit_timestamp') = 'on'
                THEN greatest(0, extract(epoch FROM now() - pg_xact_commit_timestamp(q.xmin)))::float8 END
    FROM queue AS q
    WHERE q.stage = ANY (ARRAY[s.stage]) AND q.status = 'pending'
    ORDER BY q.stage, q.ingress_id
    LIMIT 1)
FROM unnest(%(stages)s::text[]) AS s(stage)
"""
STATUS_WORKERS = """
SELECT application_name, count(*)
FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'pepsi/%'
GROUP BY application_name
"""
STATUS_TOTALS = """
SELECT d.stages, d.messages, (
    SELECT greatest(0, least(extract(epoch FROM q.timeout - now())::float8, 1e9))
    FROM queue AS q
    WHERE q.status = 'paused' AND q.timeout < 'infinity' AND q.timeout > '-infinity'
    ORDER BY q.timeout
    LIMIT 1)
FROM dispatch_stats AS d
"""

# check
CHECK_SERVER = """
SELECT current_setting('server_version'), current_setting('server_version_num'), pg_backend_pid(),
       pg_is_in_recovery(), current_setting('transaction_read_only') = 'on'
"""
CHECK_CONNECTIONS = """
SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
       (SELECT count(*) FROM pg_stat_activity
        WHERE pid <> pg_backend_pid() AND application_name NOT LIKE 'pepsi%' AND datname IS NOT NULL)
"""
CHECK_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, NULL)
FROM pg_attribute AS a
WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped
"""
CHECK_RIGHTS = """
SELECT c FROM unnest(%(columns)s::text[]) AS c
WHERE NOT has_column_privilege(to_regclass(%(table)s)::oid, c, %(right)s)
"""
CHECK_KEY = """
SELECT 1
FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid = 'queue'::regclass AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
  AND i.indnkeyatts = 1 AND a.attname = 'ingress_id'
"""
CHECK_PARTIAL = """
SELECT 1
FROM pg_index AS i
WHERE i.indrelid = 'queue'::regclass AND i.indisvalid AND pg_get_expr(i.indpred, i.indrelid) LIKE %(status)s
"""
CHECK_PENDING = """
SELECT 1
WHERE pg_get_indexdef(to_regclass(%(index)s)) LIKE '%%(stage, ingress_id)%%pending%%'
"""
CHECK_OLD = """
SELECT pid, concat_ws(' ', usename, application_name), extract(epoch FROM now() - xact_start)::float8
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND now() - xact_start > %(limit)s * interval '1 second'
ORDER BY xact_start
LIMIT 3
"""
CHECK_DEAD = "SELECT n_dead_tup, n_live_tup FROM pg_stat_user_tables WHERE relid = to_regclass('queue')"
CHECK_TRIGGER = """
SELECT 1 FROM pg_trigger
WHERE tgrelid = 'queue'::regclass AND NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 4 = 4
"""


def array(values: Iterable[Any]) -> str:
    """Write numbers, or text and None, as PostgreSQL writes an array: one constant to the server, where psycopg2 makes
    of a list an expression for each element, parsed and planned every time."""
    values = list(values)
    if not values or isinstance(values[0], (int, float)):
        return '{%s}' % str(values)[1:-1]
    alike = values.count(values[0]) == len(values)  # as nearly all are that are written together
    texts = ['NULL' if v is None else '"%s"' % v.replace('\\', '\\\\').replace('"', '\\"')
             for v in (values[:1] if alike else values)]
    return '{%s}' % ','.join(texts * len(values) if alike else texts)


# -- decisions: no I/O, no clock, no database, no log ------------------------------------------------------------------

_STATUS = re.compile(rb'(0|[1-9][0-9]{0,2})(?: (.*))?\Z', re.DOTALL)
_SECONDS = re.compile(r'(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z')


def parse_pair(token: bytes) -> Optional[Tuple[str, float]]:
    """Read STAGE=SECONDS; None if it is no such pair. Seconds are finite decimals >= 0, exponents allowed; no stage is
    called `id`."""
    try:
        stage, equals, number = token.decode('utf-8').rpartition('=')
    except UnicodeDecodeError:
        return None
    if not stage or stage == 'id' or not stage.isprintable() or not _SECONDS.match(number) or float(number) == math.inf:
        return None
    return stage, float(number)


def parse_answer(line: bytes) -> Answer:
    """Read a status line without its newline. Raises Violation if it is none.

    N [id=ID] [STAGE=SECONDS ...] [text], N from 0 to 255; the first token that is no pair begins the text; after 0
    there is none. Source: the worker protocol.
    """
    match = _STATUS.match(line)
    if not match or int(match.group(1)) > 255:
        raise Violation('not a status line: ' + show(line))
    status, rest = int(match.group(1)), match.group(2) or b''
    if not rest:
        return Answer(status, None, (), '')
    ident, fused = None, []
    token, _, tail = rest.partition(b' ')
    if token.startswith(b'id='):
        if not re.match(rb'id=-?[0-9]{1,19}\Z', token):
            raise Violation('not an id: ' + show(line))
        ident, rest = int(token[3:]), tail
    while rest:
        token, _, tail = rest.partition(b' ')
        pair = parse_pair(token) if token else None
        if token and not pair:
            break
        if pair:
            fused.append(pair)
        rest = tail
    if status == 0 and rest:
        raise Violation('text after a success: ' + show(line))
    return Answer(status, ident, tuple(fused), rest.decode('utf-8', 'replace'))


PLAIN_SUCCESS = Answer(0, None, (), '')  # what most answers are, once their id was compared


def show(data: bytes) -> str:
    """Offending bytes for a message: printable, bounded, in quotes."""
    return "'%s'" % printable(data[:400].decode('utf-8', 'backslashreplace'), 160)


class Framing:
    """Cuts what a worker writes into lines."""

    def __init__(self) -> None:
        self._rest = b''

    def feed(self, data: bytes) -> Tuple[List[bytes], Optional[bytes]]:
        """Take bytes in whatever chunks; return the lines that are complete now, without newlines, and the start of
        a line that is longer than LINE_LIMIT, if one is (nothing after it counts)."""
        lines = (self._rest + data).split(b'\n')
        self._rest = lines.pop()
        for i, line in enumerate(lines):
            if len(line) > LINE_LIMIT:
                return lines[:i], line
        return lines, self._rest if len(self._rest) > LINE_LIMIT else None


def describe_exit(status: int, ours: bool = False) -> str:
    """Say how a process ended, from its wait status; `ours`: we killed it."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = 'signal %d' % number
        return 'killed by %s%s' % (name, ' (perhaps out of memory)' if number == signal.SIGKILL and not ours else '')
    return 'exited with status %d' % os.WEXITSTATUS(status)


def judge(stage: str, ids: Sequence[int], began: bool, doom: Optional[Doom], how: str, spared: bool) -> List[Outcome]:
    """Say what becomes of the unanswered ids of a dead worker, oldest first.

    `began`: it had begun to read the head of line; `doom`: why we killed it, if we did; `how` it ended; `spared`:
    nobody is blamed (a stop, a database outage). At most the head fails; all others are released.
    """
    outcomes = [Outcome(i, stage, Row.PENDING, ended=False) for i in ids]
    if not ids or spared:
        return outcomes
    if doom:
        if doom.id == ids[0]:
            outcomes[0] = Outcome(ids[0], stage, doom.status, doom.error, column=doom.column)
    elif began:
        outcomes[0] = Outcome(ids[0], stage, Row.FAILED, 'crash: worker ' + how, column='crashes')
    return outcomes


class Breaker:
    """Holds a stage off that only dies: CLOSED -> COOLING -> PROBING -> CLOSED or COOLING.

    COOLING claims nothing; when its time is over one worker with one id probes; the first answer closes it. A worker
    that lived through all that proves nothing about starting others: `spawn_at` stays until a younger one answers.
    """

    def __init__(self) -> None:
        self.deaths = 0  # in a row, without an answer between them
        self.trips = 0  # in a row: the exponent of the delay
        self.cooling = False
        self.until = 0.0  # deadline of the cooldown; PROBING after it
        self.spawn_at = 0.0  # no worker is started before
        self._opened = 0.0
        self._died_at = -math.inf

    def died(self, now: float, blamed: bool, started: bool, answered_at: float = -math.inf) -> bool:
        """A worker died unasked that had answered last at `answered_at`. Returns whether the stage cools down now.

        Of answers and deaths that came in one turn nobody knows the order: an answer of the dead counts as between.
        """
        if answered_at >= self._died_at:
            self.deaths = 0
        self.deaths += 1
        self._died_at = now
        if started and self.deaths < DEATHS_IN_A_ROW and not self.cooling:
            return False
        return self._open(now, blamed)

    def cannot_start(self, now: float) -> bool:
        """A worker could not be started. Returns whether the stage cools down now."""
        return self._open(now, False)

    def _open(self, now: float, blamed: bool) -> bool:
        if self.cooling and now < self.until:  # others of the same batch: they were started before
            return False
        first, blameless, costly = COOLDOWN_S
        self.until = self.spawn_at = now + min(first * 2 ** min(self.trips, 20), costly if blamed else blameless)
        self.trips += 1
        self.cooling = True
        self._opened = now
        return True

    def answered(self, born: float) -> None:
        """A worker that was started at `born` answered."""
        self.deaths = 0
        self.cooling = False
        if born >= self._opened:
            self.trips = 0
            self.spawn_at = 0.0

    def closed(self, now: float) -> bool:
        """Whether the stage may claim at all, if only a probe."""
        return not self.cooling or now >= self.until

    def probing(self, now: float) -> bool:
        """Whether one worker with one id is all that may be in flight."""
        return self.cooling and now >= self.until


class Pool:
    """The bookkeeping of one stage. Calls nobody; every worker in it is a Worker, in order of birth."""

    def __init__(self, config: StageConfig) -> None:
        self.config = config
        self.ready: Deque[int] = collections.deque()  # claimed, not handed: ascending
        self.workers: List[Worker] = []
        self.breaker = Breaker()
        self.average_s: Optional[float] = None  # of the latest passes; None: unknown
        self.looking = True  # there is a reason to look for pending rows
        self.below = True  # ... and they may stand below `floor`
        self.floor = FIRST_ID  # what is below was seen: a hint, rows that committed late or went back stand there
        self._noted = LAST_ID  # the lowest id that was noted while a claim was under way

    def in_flight(self) -> int:
        """Ids of this pool that a worker holds."""
        return sum(len(w.inflight) for w in self.workers)

    def renew(self, config: StageConfig) -> None:
        """Go on with another configuration; what was learned of the old program does not count."""
        self.config = config
        self.breaker = Breaker()
        self.average_s = None
        self.look()

    def look(self, id: Optional[int] = None) -> None:
        """Note that a row has become pending; without `id`: that any may have."""
        self.looking = True
        if id is None:
            self.below = True
        else:
            self.floor = min(self.floor, id)
            self._noted = min(self._noted, id)

    def want(self, room: int, below: bool) -> Want:
        """Make its part of a claim, from the floor, or from the beginning if that is wished and `below` allows it. What
        is noted until the reply counts for the next one."""
        below = below and self.below
        self.looking, self.below, self._noted = False, self.below and not below, LAST_ID
        return Want(self.config.name, room, FIRST_ID if below else self.floor)

    def per_worker(self) -> int:
        """Ids that a new worker may hold at once."""
        return min(self.config.queue_limit, self.config.max_messages or self.config.queue_limit)

    def room(self, now: float) -> int:
        """Ids that could be claimed now, beyond those that are ready."""
        if not self.breaker.closed(now):
            return 0
        if self.breaker.probing(now):
            free = not self.ready and not self.in_flight()
            return int(free and (len(self.workers) < self.config.parallelism or any(w.room() for w in self.workers)))
        room = sum(w.room() for w in self.workers) - len(self.ready)
        if now >= self.breaker.spawn_at:
            room += max(0, self.config.parallelism - len(self.workers)) * self.per_worker()
        return max(0, room)

    def worth_claiming(self, now: float) -> int:
        """The room, if a claim pays now: half of the pool is free, a worker has run dry or could be started; else
        0."""
        room = self.room(now)
        if 2 * room >= self.config.parallelism * self.config.queue_limit:
            return room
        if self.ready or not room:
            return 0
        dry = any(w.room() and len(w.inflight) <= 1 for w in self.workers)
        startable = len(self.workers) < self.config.parallelism and now >= self.breaker.spawn_at
        return room if dry or startable else 0

    def claimed(self, want: Want, ids: Sequence[int], room: int) -> None:
        """Take the first `room` ids of a claim, ascending. It came back full: there may be more above the last one.
        It came back short: nothing is left to look for, unless something was noted meanwhile."""
        self.ready.extend(ids[:room])
        if len(self.ready) > len(ids):
            self.ready = collections.deque(sorted(self.ready))
        floor = ids[-1] + 1 if ids else want.floor
        if len(ids) >= want.cap:
            self.looking = True
        else:
            floor = max(floor, self.floor)
        self.floor = min(floor, self._noted)

    def quick(self) -> Optional[bool]:
        """Whether passes are short enough to pack ids behind one another; None: unknown."""
        if self.average_s is None:
            return None if self.config.pack_below_s else False
        return self.average_s < self.config.pack_below_s

    def passed(self, seconds: float, first: bool) -> None:
        """A pass took `seconds`. The `first` of a worker includes the program's start: it counts only where it is
        short all the same."""
        if first and seconds >= self.config.pack_below_s:
            return
        old = seconds if self.average_s is None else self.average_s
        self.average_s = old + AVERAGE_WEIGHT * (seconds - old)

    def choose(self, now: float) -> Tuple[Optional['Worker'], int]:
        """Say who takes the next of the ready ids, and how many: (worker, n); (None, n): a new worker takes n;
        (None, 0): nobody now.

        The packing rule: as few workers as cost nobody time. An id goes behind another one only where passes are
        known to be short and the head of that line is not itself slow; else to an idle or a new worker. When all are
        busy the shortest lines take it; where passes are long only after FILL_S without an answer, since an id that
        is handed cannot be taken back, and one that waits goes to whoever is free first. While the speed is unknown
        one id shows it, and the others wait for that, PROBE_S at most.
        """
        open_workers = [w for w in self.workers if w.room()]
        quick, below_s = self.quick(), self.config.pack_below_s
        if quick is None:
            longest_s = max((w.busy_s(now) for w in self.workers if w.inflight), default=None)
            if longest_s is not None:
                if longest_s < min(PROBE_S, below_s):
                    return None, 0
                quick = longest_s < below_s
        if quick:
            busy = [w for w in open_workers if w.inflight and w.busy_s(now) < below_s]
            if busy and len(self.workers) >= self.config.parallelism and all(w.inflight for w in self.workers):
                worker = min(busy, key=lambda w: len(w.inflight))
                return worker, min(worker.room(), 1 + len(self.ready) // len(busy))
            if busy:
                worker = max(busy, key=lambda w: len(w.inflight))
                return worker, worker.room()
        many = self.per_worker() if quick else 1
        idle = [w for w in open_workers if not w.inflight]
        if idle:
            return idle[-1], min(many, idle[-1].room())
        if len(self.workers) < self.config.parallelism and now >= self.breaker.spawn_at:
            return None, many
        if open_workers and (quick or min(w.busy_s(now) for w in open_workers) >= FILL_S):
            return min(open_workers, key=lambda w: len(w.inflight)), 1
        return None, 0


class Outbox:
    """Outcomes until their commit is confirmed (I2): each is fresh, sent, or deferred."""

    def __init__(self) -> None:
        self.fresh: Dict[int, Outcome] = {}
        self.sent: Dict[int, Outcome] = {}
        self.deferred: Dict[int, Tuple[float, Outcome]] = {}  # id -> (deadline, outcome)
        self._tries: Dict[int, int] = {}
        # By stage: ids that are to be written and whose rows are running as far as we know. Not the deferred ones: a
        # row that somebody has locked stops nobody else, up to DEFERRED_LIMIT of them.
        self._unwritten = collections.Counter()  # type: Any

    def __len__(self) -> int:
        return len(self.fresh) + len(self.sent) + len(self.deferred)

    def ids(self) -> Iterable[int]:
        """All ids that are held here."""
        for part in (self.fresh, self.sent, self.deferred):
            yield from part

    def add(self, outcome: Outcome) -> None:
        """Take over an id that left its worker."""
        self.fresh[outcome.id] = outcome
        if outcome.column != 'processed':
            self._unwritten[outcome.stage] += 1

    def urgent(self) -> bool:
        """Whether rows are running that nobody works on."""
        return any(self._unwritten.values())

    def take(self, limit: int) -> List[Outcome]:
        """Move up to `limit` fresh outcomes to the sent ones; return them in id order, as rows are locked."""
        assert not self.sent, 'one settlement at a time'
        if len(self.fresh) <= limit:
            self.sent, self.fresh = self.fresh, {}
        else:
            for i in list(self.fresh)[:limit]:
                self.sent[i] = self.fresh.pop(i)
        return [self.sent[i] for i in sorted(self.sent)]

    def confirm(self, id: int) -> Outcome:
        """Give up an id: its commit is known."""
        if self._tries:
            self._tries.pop(id, None)
        outcome = self.sent.pop(id)
        if outcome.column != 'processed':
            self._unwritten[outcome.stage] -= 1
        return outcome

    def unwritten(self, stage: str) -> int:
        """How many of its rows a stage may claim less, because they are still running."""
        return self._unwritten[stage] + max(0, len(self.deferred) - DEFERRED_LIMIT)

    def defer(self, now: float) -> float:
        """Put off what was sent and not confirmed, longer each time. Returns the deadline of the first."""
        first, longest = DEFER_S
        for id, outcome in self.sent.items():
            tries = self._tries[id] = self._tries.get(id, 0) + 1
            self.deferred[id] = now + min(first * 2 ** min(tries - 1, 20), longest), outcome
            if outcome.column != 'processed':
                self._unwritten[outcome.stage] -= 1
        self.sent = {}
        return min((when for when, _ in self.deferred.values()), default=math.inf)

    def due(self, now: float) -> float:
        """Make deferred outcomes fresh whose time has come. Returns the deadline of the next; infinity: none."""
        for id in [id for id, (when, _) in self.deferred.items() if when <= now]:
            self.add(self.deferred.pop(id)[1])
        return min((when for when, _ in self.deferred.values()), default=math.inf)

    def unsent(self) -> None:
        """What was sent is not known to be committed: it is to be sent again."""
        self.fresh.update(self.sent)
        self.sent = {}

    def lost(self) -> None:
        """The session is lost: everything is to be sent again. A crash whose failure is not known to be written was
        found during the outage: its message is requeued, not blamed."""
        self.unsent()
        self.due(math.inf)
        for id, outcome in self.fresh.items():
            if outcome.column == 'crashes':
                self.fresh[id] = Outcome(id, outcome.stage, Row.PENDING, ended=False)


COLUMNS = ('processed', 'failed', 'timeouts', 'crashes')


class Stats:
    """Counts what ended. What is flushed is sealed first, so that an unknown commit is repeated unchanged."""

    def __init__(self) -> None:
        self.flush = 0  # number of the last sealed batch
        self.sealed: Optional[Dict[str, Any]] = None
        self._clear()

    def _clear(self) -> None:
        self._stages: Dict[str, Dict[str, float]] = collections.defaultdict(
            lambda: dict(dict.fromkeys(COLUMNS, 0), seconds=0.0))
        self._total = 0
        self._messages = 0

    def __bool__(self) -> bool:
        return bool(self._total or self._messages or self.sealed)

    def count(self, outcome: Outcome, left: bool) -> None:
        """Count a settled outcome; `left`: its message has left the pipeline."""
        self._messages += left
        if not outcome.ended:
            return
        self._total += 1 + len(outcome.fused)
        if outcome.column:
            row = self._stages[outcome.stage]
            row[outcome.column] += 1
            row['seconds'] += outcome.seconds
        for stage, seconds in outcome.fused:
            row = self._stages[stage]
            row['processed'] += 1
            row['seconds'] += seconds

    def seal(self, epoch: int) -> Dict[str, Any]:
        """Return the parameters of FLUSH: the batch that is sealed, or a new one with all that was counted."""
        if not self.sealed:
            self.flush += 1
            names = sorted(self._stages)
            columns = {column: [self._stages[name][column] for name in names] for column in COLUMNS + ('seconds',)}
            self.sealed = dict(columns, stages=names, total=self._total, messages=self._messages, flush=self.flush,
                               epoch=epoch)
            self._clear()
        return self.sealed

    def flushed(self) -> None:
        """The sealed batch is in the database."""
        self.sealed = None


# -- timers ------------------------------------------------------------------------------------------------------------

class Timers:
    """Deadlines by key: setting replaces, cancelling what is not set is no error. A timer that was cancelled or
    replaced meanwhile does not fire. Dead entries leave the heap lazily, and when they outnumber the living."""

    def __init__(self) -> None:
        self._when: Dict[Any, float] = {}
        self._heap: List[Tuple[float, int, Any]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, key: Any) -> bool:
        return key in self._when

    def set(self, key: Any, when: float) -> None:
        """Fire `key` at the deadline `when`, instead of when it was set for before. Infinity: never."""
        if self._when.get(key) == when:
            return
        if when == math.inf:
            self._when.pop(key, None)
            return
        self._when[key] = when
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, key))
        if len(self._heap) > 2 * len(self._when) + 64:
            self._heap = [(w, n, k) for w, n, k in self._heap if self._when.get(k) == w]
            heapq.heapify(self._heap)

    def soonest(self, key: Any, when: float) -> None:
        """Fire `key` at `when` unless it is set for an earlier deadline."""
        if when < self._when.get(key, math.inf):
            self.set(key, when)

    def cancel(self, key: Any) -> None:
        """Forget `key`."""
        self._when.pop(key, None)

    def next(self) -> Optional[float]:
        """The earliest deadline, None if no timer is set."""
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> List[Any]:
        """Return the keys that are due, in the order of their deadlines; they are no longer set."""
        due: List[Any] = []
        while True:
            when = self.next()
            if when is None or when > now:
                return due
            key = heapq.heappop(self._heap)[2]
            del self._when[key]
            due.append(key)

    def pending(self) -> List[Tuple[float, Any]]:
        """All timers, earliest first."""
        return sorted(((when, key) for key, when in self._when.items()), key=lambda item: item[0])


# -- worker ------------------------------------------------------------------------------------------------------------

try:
    _prctl: Optional[Callable[[int, int], int]] = ctypes.CDLL(None).prctl
except (AttributeError, OSError, TypeError):  # not Linux: EOF on stdin has to do
    _prctl = None
PR_SET_PDEATHSIG = 1


def _become_worker(parent: int) -> None:
    """Run in the child between fork and exec: default dispositions, empty mask, death with the dispatcher."""
    signal.set_wakeup_fd(-1)  # the self-pipe is the parent's
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):  # numbers that the C library keeps to itself
                pass
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if _prctl:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


class Child:
    """One child process and our ends of its pipes; closed by close(), once."""

    def __init__(self, argv: Sequence[str], environ: Dict[str, str]) -> None:
        """Start it. Raises OSError, and leaves nothing behind then."""
        fds: List[int] = []
        try:
            fds += os.pipe()
            fds += os.pipe()
            theirs_in, ours_in, ours_out, theirs_out = fds
            os.set_blocking(ours_in, False)
            os.set_blocking(ours_out, False)
            parent = os.getpid()
            self._process = subprocess.Popen(
                argv, stdin=theirs_in, stdout=theirs_out, env=environ, close_fds=True, start_new_session=True,
                preexec_fn=lambda: _become_worker(parent))
        except subprocess.SubprocessError as e:
            for fd in fds:
                os.close(fd)
            raise OSError(0, str(e)) from None
        except (OSError, ValueError):
            for fd in fds:
                os.close(fd)
            raise
        os.close(theirs_in)
        os.close(theirs_out)
        self.pid = self._process.pid
        self.stdin: Optional[int] = ours_in
        self.stdout: Optional[int] = ours_out

    def read(self) -> Optional[bytes]:
        """One bounded read: bytes, b'' at end of file, None if there is nothing now. Does not block."""
        if self.stdout is None:
            return b''
        try:
            return os.read(self.stdout, READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b''

    def write(self, data: bytes) -> int:
        """Write what fits now and return how many bytes that was; -1: nothing will fit any more, nobody reads. That is
        no verdict: the exit status of the worker, not its pipe, tells what happened. Does not block."""
        if self.stdin is None:
            return -1
        try:
            return os.write(self.stdin, data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return -1

    def unread(self) -> int:
        """Bytes in its stdin pipe that it has not read; 0 where the system cannot tell."""
        if self.stdin is None:
            return 0
        try:
            return struct.unpack('i', fcntl.ioctl(self.stdin, termios.FIONREAD, b'\0\0\0\0'))[0]
        except OSError:
            return 0

    def signal(self, number: int, group: bool = False) -> None:
        """Send a signal to the process, or to its group. Not called after reap (I7)."""
        try:
            (os.killpg if group else os.kill)(self.pid, number)
        except (ProcessLookupError, PermissionError):  # all zombies; a program that changed its user
            pass

    def reap(self) -> int:
        """Kill what is left of the group of a process that has ended, then take its wait status (I7)."""
        self.signal(signal.SIGKILL, group=True)
        status = os.waitpid(self.pid, 0)[1]
        self._process.returncode = 0  # it must not look for the status itself
        return status

    def close_stdin(self) -> None:
        """Give it end of file."""
        fd, self.stdin = self.stdin, None
        if fd is not None:
            os.close(fd)

    def close_stdout(self) -> None:
        """Stop listening to it."""
        fd, self.stdout = self.stdout, None
        if fd is not None:
            os.close(fd)


class Worker:
    """What one worker holds and in which state it is. Takes the clock from its caller.

    | state   | hand | answers count | leaves the state when |
    |---------|------|---------------|-----------------------|
    | SERVING | yes  | yes           | handed all it may, reloaded -> FINISHING; idle, stop -> LEAVING; see (1) |
    | FINISHING | no | yes           | drained, stop -> LEAVING; see (1) |
    | LEAVING | no   | yes           | reaped -> GONE; grace over -> KILLED; see (1) |
    | KILLED  | no   | those in time | reaped -> GONE |
    | GONE    | no   | no            | |

    (1) watchdog, violation -> KILLED; reaped -> GONE
    """

    def __init__(self, pool: Pool, child: Any, now: float) -> None:
        self.pool = pool
        self.child = child
        self.pid: int = child.pid
        self.state = WorkerState.SERVING
        self.inflight: Deque[int] = collections.deque()  # unanswered ids, the head of line first
        self.doom: Optional[Doom] = None  # why we killed it
        self.born = now
        self.head_since = now  # when the head of line became it
        self.idle_since = now
        self.handed = 0  # ids in its life
        self._limit = pool.config.queue_limit  # of unanswered ids
        self._allowance = pool.config.max_messages or sys.maxsize  # of ids in its life
        self.answers = 0
        self.answered_at = -math.inf
        self.eof = False  # it closed its stdout
        self.pending = b''  # not yet taken by its stdin pipe
        self._framing = Framing()
        self._trusted = True  # I3: all that it wrote were answers
        self._overlong = False  # nothing more is read
        self._reading_since: Optional[float] = None  # when it was first seen to have read something

    def alive(self) -> bool:
        """Whether it is neither killed nor gone."""
        return self.state not in (WorkerState.KILLED, WorkerState.GONE)

    def room(self) -> int:
        """Ids that it could take now."""
        if self.state is not WorkerState.SERVING:
            return 0
        room, rest = self._limit - len(self.inflight), self._allowance - self.handed
        return room if room < rest else rest

    def busy_s(self, now: float) -> float:
        """How long the head of line has been at work, as far as we know; a worker that is starting up works on
        nothing yet, for START_S at most."""
        if self.answers or now - self.born > START_S:
            return now - self.head_since
        return now - self._reading_since if self._reading_since is not None else 0.0

    def watch_start(self, now: float) -> None:
        """Look whether a new worker has begun to read."""
        if self.answers == 0 and self._reading_since is None and self.inflight and self.began():
            self._reading_since = now

    def hand(self, ids: Sequence[int], now: float) -> None:
        """Give it ids, not more than room(); flush() writes them all at once."""
        assert 0 < len(ids) <= self.room(), 'worker %d has no room' % self.pid
        if not self.inflight:
            self.head_since = now
        self.inflight.extend(ids)
        self.handed += len(ids)
        self.pending += b''.join([b'%d\n' % i for i in ids])
        if self.handed == self._allowance:
            self.finish()

    def finish(self) -> None:
        """Take no more ids; to be told to leave when what it has is answered."""
        if self.state is WorkerState.SERVING:
            self.state = WorkerState.FINISHING

    def flush(self) -> bool:
        """Write what its pipe takes now. Returns whether there is nothing to wait for. What nobody reads stays: it was
        not begun."""
        written = self.child.write(self.pending) if self.pending else 0
        if written > 0:
            self.pending = self.pending[written:]
        return written < 0 or not self.pending

    def receive(self, limit: int = READ_SIZE) -> Tuple[List[bytes], Optional[str]]:
        """Read up to `limit` bytes (rounded up to whole reads); return complete lines and what is wrong, if
        anything is. Lines come before the wrong."""
        lines, wrong = [], None  # type: List[bytes], Optional[str]
        while limit > 0 and not self.eof and self._trusted and not self._overlong:
            data = self.child.read()
            if data is None:
                break
            self.eof = data == b''
            limit -= READ_SIZE
            more, overlong = self._framing.feed(data)
            lines += more
            if overlong is not None:
                self._overlong = True
                wrong = 'a line of more than %d bytes: %s' % (LINE_LIMIT, show(overlong))
        return lines, wrong

    def answer(self, line: bytes, now: float) -> Tuple[int, Answer, float]:
        """Take a line as the answer of the head of line. Returns its id, the answer and the seconds it took.

        Raises Violation (I3) if it is no answer to that id; then nothing has changed, but nothing more is believed.
        """
        if not self._trusted:
            raise Violation('after a violation: ' + show(line))
        self._trusted = False
        answer = PLAIN_SUCCESS if line == b'0' or (self.inflight and line == b'0 id=%d' % self.inflight[0]) else \
            parse_answer(line)
        if not self.inflight:
            raise Violation('an answer to nothing: ' + show(line))
        if answer.id is not None and answer.id != self.inflight[0]:
            raise Violation('the wrong id, %d is at the head of line: %s' % (self.inflight[0], show(line)))
        self._trusted = True
        seconds = now - self.head_since
        self.answers += 1
        self.head_since = self.idle_since = self.answered_at = now
        return self.inflight.popleft(), answer, seconds

    def began(self) -> bool:
        """Whether it has begun to read the head of line: less is unread than all that is unanswered."""
        unread = self.child.unread() + len(self.pending)
        return unread < sum(len(b'%d\n' % i) for i in self.inflight)

    def leave(self) -> None:
        """Close its stdin: it is to finish what it has read, then to exit."""
        self.state = WorkerState.LEAVING
        self.pending = b''
        self.child.close_stdin()

    def kill(self, doom: Optional[Doom]) -> None:
        """Kill its group at once; `doom` says why and who answers for it, if it was not to be killed anyway."""
        if self.doom is None:
            self.doom = doom
        self.state = WorkerState.KILLED
        self.child.signal(signal.SIGKILL, group=True)

    def bury(self) -> int:
        """Take the exit status of a process that has ended. Its stdout may still be read."""
        self.state = WorkerState.GONE
        return self.child.reap()


# -- queue: the database session ---------------------------------------------------------------------------------------

class Statement(NamedTuple):
    """What an operation yields: SQL, its parameters, and the time limit that the server has for it."""
    sql: str
    params: Dict[str, Any] = {}
    timeout_s: float = STATEMENT_TIMEOUT_S


class Pause(NamedTuple):
    """What an operation yields to go on later."""
    seconds: float


class Reply(NamedTuple):
    """Fact: an operation has ended. `error` None: it is committed; else it is not, and the session lives."""
    name: str
    value: Any
    error: Optional[Exception]


class Lost(NamedTuple):
    """Fact: there is no session any more, or the try to get one has failed. Whatever was under way is unknown."""
    reason: str


class Waiting(NamedTuple):
    """Fact: somebody else holds the lock."""
    holder: str


class Taken(NamedTuple):
    """Fact: the session is ready, the lock is ours."""
    system: str  # tells this database from others
    epoch: int
    flush: int


class Replaced(NamedTuple):
    """Fact: another dispatcher has taken over since our last session."""
    epoch: int


def unusable(e: Exception) -> str:
    """Say what is wrong with the tables, from an error in MISSING, and what helps."""
    if getattr(e, 'pgcode', None) == '42501':
        return ('the database role lacks rights: %s; pepsi-dispatch check prints the GRANTs that are missing'
                % complaint(e))
    return 'the tables are missing or unusable: %s; run pepsi-dispatch init' % complaint(e)


class _Bell:
    """Stands in for the list of notifications: only counts them. Those that our own writes cause, by a trigger of
    somebody, are no news."""

    def __init__(self) -> None:
        self.rung = 0
        self.own = 0  # our server process

    def append(self, notify: Any) -> None:
        self.rung += notify.pid != self.own


RETRIABLE = frozenset(['40001', '40P01'])  # serialization failure, deadlock
STALE = frozenset(['0A000', '26000'])  # a prepared statement that a changed table or DISCARD has spoilt: a new session
LOCKED = '55P03'  # lock_timeout
CANCELLED = '57014'  # statement_timeout
MISSING = frozenset(['42P01', '42703', '42501', '3F000', '42883', '42804', '42846', '42809'])

POOLED = ('the session does not keep its lock and LISTEN: a transaction pooler is in between; DATABASE must lead to '
          'the server itself, or to a pool in session mode')

# Classes of SQLSTATE that speak of the session, the server or the tables; all else may be the fault of a single row:
# its data, a constraint, a trigger that raises what it likes.
NO_ROWS_FAULT = ('08', '0A', '25', '26', '28', '2D', '3F', '40', '42', '53', '54', '55', '57', '58', 'F0', 'XX')

Operation = Generator[Any, Any, Any]


def blames_row(e: Exception) -> bool:
    """Whether a statement failed because of something in a row, so that others would be written without it."""
    return isinstance(e, ValueError) or (getattr(e, 'pgcode', None) or '08')[:2] not in NO_ROWS_FAULT


def complaint(e: BaseException) -> str:
    """The first line of an error, for the log; connection strings and passwords are not part of libpq's."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(e).__name__, 300)


def shares_session(dsn: str, pid: int, timeout_s: float = 3.0) -> bool:
    """Say whether a second connection in a transaction of its own gets the server process `pid` of the first one: then
    there is a transaction pooler. Asked only where the protocol's own process number is not the server's. Blocks,
    `timeout_s` at most; False if it is not to be found out."""
    deadline = time.monotonic() + timeout_s
    try:
        conn = psycopg2.connect(dsn, async_=1)
        try:
            for connected in (False, True):
                if connected:
                    cursor = conn.cursor()
                    cursor.execute('BEGIN; SELECT pg_backend_pid()')
                while True:
                    state = conn.poll()
                    if state == psycopg2.extensions.POLL_OK:
                        break
                    writing = state == psycopg2.extensions.POLL_WRITE
                    with selectors.DefaultSelector() as selector:
                        selector.register(conn.fileno(), selectors.EVENT_WRITE if writing else selectors.EVENT_READ)
                        if not selector.select(deadline - time.monotonic()):
                            return False
            return cursor.fetchall() == [(pid,)]
        finally:
            conn.close()
    except psycopg2.Error:
        return False


class Queue:
    """The one database session, asynchronous: the only user of psycopg2. At most one operation at a time.

    Every statement has a deadline here that lies behind the server's own. Whatever goes wrong becomes a fact: no
    method raises because of the database.
    """

    def __init__(self, dsn: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._dsn = dsn
        self._clock = clock
        self._conn: Any = None
        self._cursor: Any = None
        self._bell = _Bell()
        self._name = ''  # of the operation under way
        self._task: Optional[Operation] = None
        self._statement: Optional[Statement] = None  # sent, not replied
        self._sent_at = 0.0
        self._repeats = 0
        self._again = False  # the statement has failed, and is to be sent once more at the deadline
        self._waiting: Optional[Waiting] = None
        self.backend = 0  # server process of the last session that had the lock, for the log
        self._durable = 'on'  # what synchronous_commit is here
        self._failures = 0  # in a row, of getting a session
        self._skip_until = -math.inf  # claims skip locked rows until then
        self.partial = False  # the last claim met a bad row: what it did not return may be pending all the same
        self.hushes = False  # this session has HUSH_KEY, as far as we know
        self._unheard = True  # somebody may be silent who is still to commit
        self._parked: Dict[int, Tuple[float, int]] = {}  # ids that cannot be written: passed over until when, tries
        self.link = Link.AWAY
        self.epoch: Optional[int] = None  # ours, once taken over
        self.deadline = 0.0  # when tick() is to be called next; infinity: not
        self.fd: Optional[int] = None  # for the selector; changes while connecting
        self.writing = False  # the selector is to wait for room, too
        self.statements = 0

    # life-cycle

    def tick(self) -> List[Any]:
        """Do what is due at the deadline: connect, repeat a statement, or give up on a silent server."""
        if self._clock() < self.deadline:
            return []
        if self.link is Link.AWAY:
            return self._connect()
        if self._cursor is None:
            return self._lose('no connection within %s' % brief(CONNECT_TIMEOUT_S))
        if self._statement is None:
            return self._resume(None)  # a pause is over
        if self._again:
            return self._send(self._statement)
        return self._lose('no reply within %s' % brief(self._statement.timeout_s + REPLY_MARGIN_S))

    def close(self) -> None:
        """End the session without waiting for anything."""
        self._drop()
        self.deadline = math.inf

    def give_up(self, reason: str) -> List[Any]:
        """Drop a session that cannot be trusted; a new one follows."""
        return self._lose(reason)

    def busy(self) -> bool:
        """Whether no operation can be started now."""
        return self.link is not Link.READY or self._task is not None

    def skipping(self) -> bool:
        """Whether claims skip locked rows now: what they did not return may be pending all the same."""
        return self._clock() < self._skip_until

    def rung(self) -> int:
        """Take the notice that others sent NOTIFY, and how often."""
        rung, self._bell.rung = self._bell.rung, 0
        return rung

    # operations: the reply is a fact of a later turn

    def claim(self, wants: Sequence[Want], held: Sequence[int]) -> List[Any]:
        """Set pending rows running; the value of the reply is a list of (id, stage), in no order."""
        return self._start('claim', self._claiming(wants, held))

    def exchange(self, outcomes: Sequence[Outcome], wants: Sequence[Want], held: Sequence[int]) -> List[Any]:
        """Settle and claim in one round trip; the value of the reply is the pair of both values, the second None if
        that part failed."""
        return self._start('exchange', self._exchanging(outcomes, wants, held))

    def settle(self, outcomes: Sequence[Outcome]) -> List[Any]:
        """Write outcomes; the value of the reply is a list of Settled, for those whose commit is sure."""
        return self._start('settle', self._settling(outcomes))

    def revive(self, held: Sequence[int], sweep: bool) -> List[Any]:
        """Retry paused rows that are due and, with `sweep`, reset rows without an owner; the value of the reply is a
        list of (what, stage, rows, next_due_s), as REVIVE says."""
        params = {'held': array(self._passed_over(held)), 'sweep': sweep, 'limit': RETRY_LIMIT, 'key': LOCK_KEY}
        return self._start('revive', self._reviving(Statement(SWEEP if sweep else REVIVE, params), list(held)))

    def strangers(self, stages: Iterable[str]) -> List[Any]:
        """Look for pending rows of other stages; the value of the reply is a list of (stage,)."""
        return self._start('strangers', self._single(Statement(STRANGERS, {'stages': array(stages)})))

    def hush(self, silent: bool) -> List[Any]:
        """Have our triggers be silent, where those who insert wait for one another, or notify again; the value of the
        reply is whether somebody is silent, or was and is still to commit."""
        return self._start('hush', self._hushing(silent))

    def flush(self, batch: Dict[str, Any]) -> List[Any]:
        """Add a sealed batch of statistics once; the value of the reply is what FLUSH says."""
        params = {key: array(value) if isinstance(value, list) else value for key, value in batch.items()}
        return self._start('flush', self._single(Statement(FLUSH, params)))

    def _single(self, statement: Statement) -> Operation:
        return (yield statement)

    def _hushing(self, silent: bool) -> Operation:
        # Note: an advisory lock that was got stays when its statement fails. Taken twice it is to be given back
        # twice; to give back one that we do not have is a warning.
        if silent and not self.hushes:
            before, self.hushes, self._unheard = self._unheard, True, True
            [(self.hushes,)] = yield Statement(HUSH)
            self._unheard = before or self.hushes
        elif not silent:
            [(heard,)] = yield Statement(CALL if self.hushes else ALL_HEARD)
            if heard:
                self.hushes = self._unheard = False
        return self._unheard

    def _passed_over(self, held: Sequence[int]) -> List[int]:
        """The held ids, and those that are parked."""
        now, longest = self._clock(), DEFER_S[1]
        self._parked = {id: (until, tries) for id, (until, tries) in self._parked.items() if until + longest > now}
        return list(held) + [id for id, (until, _) in self._parked.items() if until > now]

    def _park(self, id: int, what: str, e: Exception) -> None:
        """Pass over a row that cannot be written, longer each time."""
        tries = self._parked.get(id, (0.0, 0))[1]
        delay_s = min(DEFER_S[0] * 2 ** min(tries, 20), DEFER_S[1])
        log.warning('cannot %s %d: %s; passing over it for %s', what, id, complaint(e), brief(delay_s))
        self._parked[id] = self._clock() + delay_s, tries + 1

    def parked_until(self) -> float:
        """The deadline at which a parked row is worth a look again; infinity: there is none."""
        now = self._clock()
        return min((until for until, _ in self._parked.values() if until > now), default=math.inf)

    def _reviving(self, statement: Statement, held: List[int]) -> Operation:
        """Revive; where a bad row keeps the others from being written, find it, park it, and try again."""
        try:
            return (yield statement)
        except (psycopg2.Error, ValueError) as e:
            if getattr(e, 'pgcode', None) == CANCELLED and statement.sql == SWEEP:
                return (yield statement._replace(sql=LONG_SWEEP, timeout_s=SWEEP_TIMEOUT_S))
            if not blames_row(e):
                raise
        for id, status in (yield Statement(REVIVABLE, statement.params)):
            try:
                yield Statement(REVIVE_ONE, {'id': id, 'status': status})
            except (psycopg2.Error, ValueError) as e:
                if not blames_row(e):
                    raise
                self._park(id, 'set pending', e)
        return (yield statement._replace(params=dict(statement.params, held=array(self._passed_over(held)))))

    def _claiming(self, wants: Sequence[Want], held: Sequence[int]) -> Operation:
        held = self._passed_over(held)
        self.partial = False
        try:
            return (yield from self._claim(wants, held))
        except (psycopg2.Error, ValueError) as e:
            if not blames_row(e):
                raise
        rows: List[Tuple[int, str]] = []
        self.partial = True
        for want in wants:  # a trigger that raises for one row: only that one stays behind
            try:
                rows += yield from self._claim([want], held)
            except (psycopg2.Error, ValueError) as e:
                if blames_row(e):
                    rows += yield from self._claim_first(want, held)
                elif not rows:
                    raise
                else:
                    break  # what is claimed is committed, and must be known
        return rows

    def _claim_first(self, want: Want, held: Sequence[int]) -> Operation:
        """Claim the first pending row of a stage alone; if that is the bad one, park it."""
        try:
            return (yield from self._claim([want._replace(cap=1)], held))
        except (psycopg2.Error, ValueError) as e:
            if not blames_row(e):
                return []
            params = {'stage': want.stage, 'floor': want.floor, 'held': array(held)}
            for id, in (yield Statement(FIRST_PENDING, params)):
                self._park(id, 'claim', e)
            return []

    def _claim(self, wants: Sequence[Want], held: Sequence[int]) -> Operation:
        params = {'stages': array([w.stage for w in wants]), 'caps': array([w.cap for w in wants]),
                  'floors': array([w.floor for w in wants]), 'held': array(held)}
        if not self.skipping():
            try:
                return (yield Statement(PREPARED_CLAIM if len(held) <= PREPARED_HELD else CLAIM, params))
            except psycopg2.Error as e:
                if e.pgcode != LOCKED:
                    raise
            self._skip_until = self._clock() + SKIP_LOCKED_S
        return (yield Statement(CLAIM_SKIPPING, params))

    def _exchanging(self, outcomes: Sequence[Outcome], wants: Sequence[Want], held: Sequence[int]) -> Operation:
        """Both at once; one after the other where a locked or a bad row is in the way."""
        self.partial = False
        if len(held) <= PREPARED_HELD and not self.skipping():
            params = dict(self._params(outcomes), wanted=array([w.stage for w in wants]),
                          caps=array([w.cap for w in wants]), floors=array([w.floor for w in wants]),
                          held=array(self._passed_over(held)))
            try:
                rows = yield Statement(PREPARED_EXCHANGE, params)
            except (psycopg2.Error, ValueError) as e:
                if getattr(e, 'pgcode', None) == LOCKED:
                    self._skip_until = self._clock() + SKIP_LOCKED_S
            else:
                return (self._read_settled(outcomes, [row for row in rows if row[3] != -1]),
                        [(row[0], row[2]) for row in rows if row[3] == -1])  # no row is due at -1 s
        settled = yield from self._settling(outcomes)
        try:
            return settled, (yield from self._claiming(wants, held))
        except psycopg2.Error as e:
            log.debug('claim failed after a settlement: %s', complaint(e))
            return settled, None

    def _settling(self, outcomes: Sequence[Outcome]) -> Operation:
        """Settle, by halves where a bad row (a trigger, a value) keeps the others from being written: it stays
        behind alone."""
        try:
            return (yield from self._settle(outcomes))
        except (psycopg2.Error, ValueError) as e:
            if not blames_row(e):
                raise
            if len(outcomes) == 1:
                log.warning('cannot write what became of %d stage=%s: %s; trying again later', outcomes[0].id,
                            quoted(outcomes[0].stage), complaint(e))
                return []
        half = len(outcomes) // 2
        settled = yield from self._settling(outcomes[:half])
        try:
            return settled + (yield from self._settling(outcomes[half:]))
        except psycopg2.Error:
            if not settled:
                raise
            return settled  # the others are sent again

    def _settle(self, outcomes: Sequence[Outcome]) -> Operation:
        params, rows = self._params(outcomes), None
        if not self.skipping():
            try:
                rows = yield Statement(PREPARED_SETTLE, params)
            except psycopg2.Error as e:
                if e.pgcode != LOCKED:
                    raise
                self._skip_until = self._clock() + SKIP_LOCKED_S
        if rows is None:
            rows = yield Statement(SETTLE_SKIPPING, params)
        return self._read_settled(outcomes, rows)

    def _params(self, outcomes: Sequence[Outcome]) -> Dict[str, Any]:
        lasting = any(o.column != 'processed' and o.status is not Row.PENDING for o in outcomes)
        return {'ids': array([o.id for o in outcomes]), 'stages': array([o.stage for o in outcomes]),
                'verdicts': array([o.status for o in outcomes]), 'errors': array([o.error for o in outcomes]),
                'durable': self._durable if lasting else 'off'}

    @staticmethod
    def _read_settled(outcomes: Sequence[Outcome], rows: Iterable[Tuple[Any, ...]]) -> List[Settled]:
        """What SETTLE returned, for those whose commit is sure: not for rows that are still running."""
        now: Dict[int, Settled] = {}
        for id, status, stage, due_s, found in rows:  # first as found, then as written
            now[id] = Settled(id, status, stage, due_s, found is None)
        gone = [Settled(o.id, None, None, None, False) for o in outcomes if o.id not in now]
        return [row for row in now.values() if row.status != RUNNING] + gone

    # connecting

    def _connect(self) -> List[Any]:
        options = {'application_name': self._name_of_session(),
                   'client_encoding': 'UTF8', 'keepalives': 1, 'keepalives_idle': 5, 'keepalives_interval': 3,
                   'keepalives_count': 3}  # type: Dict[str, Any]
        if psycopg2.extensions.libpq_version() >= 120000:
            options['tcp_user_timeout'] = 12000
        try:
            options.update(psycopg2.extensions.parse_dsn(self._dsn))
            self._conn = psycopg2.connect(async_=1, **options)
        except psycopg2.Error as e:
            return self._lose(complaint(e))
        self._conn.notifies = self._bell
        self.link = Link.OPENING
        self._name, self._task, self._statement = 'open', self._opening(), None
        self.deadline = self._clock() + CONNECT_TIMEOUT_S
        return self.receive()

    def _name_of_session(self) -> str:
        return ('pepsi-dispatch %d@%s' % (os.getpid(), socket.gethostname()))[:63]

    def _opening(self) -> Operation:
        """From a connection to a session that may work. The order matters: lock, LISTEN, epoch, then whatever the
        dispatcher looks for."""
        yield Statement(SETTINGS, {'names': list(SESSION), 'values': list(SESSION.values())})
        [(recovering, read_only, self._durable, system)] = yield Statement(CONDITION)
        try:
            system = '%s/%s' % ((yield Statement(CLUSTER))[0][0], system)
        except psycopg2.ProgrammingError:
            pass
        if recovering or read_only:
            raise Unusable('the server is in recovery' if recovering else 'the database is read-only')
        if self.epoch is None:
            [(_, _, rows)] = yield Statement(TABLES)
            if rows != 1:
                raise Failure(EXIT_CONFIG, 'dispatch_stats has %d rows instead of one; run pepsi-dispatch init' % rows)
        while not (yield Statement(LOCK, {'key': LOCK_KEY}))[0][0]:
            holders = yield Statement(HOLDER, {'key': LOCK_KEY})
            if holders and self.epoch is not None and holders[0][4] != self.epoch:
                return Replaced(holders[0][4])
            if holders:
                pid, name, address, since, _ = holders[0]
                if (pid, name) == (self.backend, self._name_of_session()):  # ours: the server has not noticed
                    yield Statement(TERMINATE, {'pid': pid})
                else:
                    self._waiting = Waiting('%s, server process %d, from %s, since %s'
                                            % (printable(name or 'a session'), pid, address or 'this host', since))
            yield Pause(LOCK_POLL_S)
        self.backend = self._conn.get_backend_pid()
        yield Statement(LISTEN)
        [(kept, self._bell.own)] = yield Statement(KEPT, {'key': LOCK_KEY, 'channel': CHANNEL})
        pid = self._bell.own
        if not kept or (pid != self.backend and shares_session(self._dsn, pid)):
            yield Statement(UNLOCK)
            raise Failure(EXIT_CONFIG, POOLED)
        if self.epoch is None:
            [(epoch, flush)] = yield Statement(TAKE_OVER)
            self.epoch = epoch
        else:
            [(epoch, flush)] = yield Statement(EPOCH)
            if epoch != self.epoch:
                return Replaced(epoch)
        yield Statement(RELAX)
        yield Statement(PREPARE)
        return Taken(system, epoch, flush)

    # the machine below

    def receive(self) -> List[Any]:
        """Read what the server sent, one bounded step. Returns facts."""
        if self._conn is None:
            return []
        try:
            state = self._conn.poll()
        except (psycopg2.Error, psycopg2.Warning, ValueError) as e:
            return self._failed(e)
        self.writing = state == psycopg2.extensions.POLL_WRITE
        try:
            self.fd = self._conn.fileno()
        except psycopg2.Error as e:
            return self._failed(e)
        if state != psycopg2.extensions.POLL_OK:
            return []
        if self.link is Link.OPENING and self._cursor is None:
            self._cursor = self._conn.cursor()
            return self._resume(None)
        if self._statement is None or self._again:
            return []
        try:
            rows = self._cursor.fetchall() if self._cursor.description else []
        except (psycopg2.Error, ValueError) as e:
            return self._failed(e)
        log.log(TRACE, 'replied %s: %d rows after %.1f ms', self._name, len(rows),
                1000 * (self._clock() - self._sent_at))
        return self._replied(rows)

    def _replied(self, rows: Any, error: Optional[Exception] = None) -> List[Any]:
        """Go on with the operation after a reply, and look what else came in the same read, a notification or the end
        of the session: libpq has that, and the selector knows nothing."""
        lost = None
        try:
            self._conn.poll()
        except (psycopg2.Error, psycopg2.Warning, ValueError) as e:
            lost = e
        self._statement = None
        facts = self._resume(rows, error)
        if lost is not None and self._conn is not None:
            facts += self._lose(complaint(lost))
        return facts

    def _start(self, name: str, task: Operation) -> List[Any]:
        assert not self.busy(), 'one operation at a time'
        self._name, self._task = name, task
        return self._resume(None)

    def _resume(self, value: Any, error: Optional[Exception] = None) -> List[Any]:
        """Go on with the operation, with a reply or an error, to its next statement or its end."""
        task = self._task
        assert task is not None
        self._waiting = None
        try:
            step = task.send(value) if error is None else task.throw(error)
        except StopIteration as end:
            return self._ended(end.value)
        except Failure as e:
            return [e]
        except Unusable as e:
            return self._lose('%s; it cannot be written to' % e)
        except (psycopg2.Error, ValueError) as e:
            if self.link is Link.OPENING:
                return self._refused(e)
            self._task = None
            self.deadline = math.inf
            return [Reply(self._name, None, e)]
        if isinstance(step, Pause):
            self.deadline = self._clock() + step.seconds
            return [self._waiting] if self._waiting else []
        self._repeats = 0
        return self._send(step)

    def _ended(self, value: Any) -> List[Any]:
        self._task = None
        self.deadline = math.inf
        if self.link is not Link.OPENING:
            return [Reply(self._name, value, None)]
        if isinstance(value, Taken):
            self.link = Link.READY
            self._failures = 0
        return [value]

    def _refused(self, e: Exception) -> List[Any]:
        """A statement of opening failed: at start missing tables end the program, all else is waited for."""
        if self.epoch is None and getattr(e, 'pgcode', None) in MISSING:
            return [Failure(EXIT_CONFIG, unusable(e))]
        return self._lose(complaint(e))

    def _send(self, statement: Statement) -> List[Any]:
        self._statement, self._again = statement, False
        self.statements += 1
        self._sent_at = self._clock()
        self.deadline = self._sent_at + statement.timeout_s + REPLY_MARGIN_S
        try:
            self._cursor.execute(statement.sql, statement.params or None)
        except (psycopg2.Error, ValueError) as e:
            return self._failed(e)
        return []

    def _failed(self, e: Exception) -> List[Any]:
        """A poll or a statement raised. A lost connection often carries no SQLSTATE: `closed` and the class tell."""
        code = getattr(e, 'pgcode', None)
        if (self._conn is None or self._conn.closed or self._statement is None
                or isinstance(e, psycopg2.InterfaceError) or str(code)[:3] in ('57P', '08P', '080') or code in STALE
                or (isinstance(e, psycopg2.OperationalError) and code is None)):
            return self._lose(complaint(e))
        if code in RETRIABLE and self._repeats < REPEATS:
            self._repeats += 1
            self._again = True
            self.deadline = self._clock() + random.uniform(0.005, 0.02) * 2 ** self._repeats
            return []  # tick() sends it again
        return self._replied(None, e)

    def _lose(self, reason: str) -> List[Any]:
        """Drop the session; the next try follows after a growing, capped delay with jitter."""
        first, longest = RECONNECT_S
        self._drop()
        delay_s = min(first * 2 ** min(self._failures, 20), longest) * random.uniform(0.75, 1.0)
        self._failures += 1
        self.deadline = self._clock() + delay_s
        return [Lost(reason)]

    def _drop(self) -> None:
        """Forget the connection. Closes our side only: the server finds out by itself."""
        conn, self._conn, self._cursor, self._statement = self._conn, None, None, None
        task, self._task = self._task, None
        self.link, self.fd, self.writing, self._again = Link.AWAY, None, False, False
        self.hushes, self._unheard = False, True
        if task is not None:
            task.close()
        if conn is not None:
            try:
                conn.close()
            except psycopg2.Error:
                pass


# -- dispatcher --------------------------------------------------------------------------------------------------------

class Signals:
    """The self-pipe. Handlers do nothing but remember the number; the C level writes the byte that wakes select()."""

    CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._caught: Set[int] = set()
        self._before = {number: signal.signal(number, self._note) for number in self.CAUGHT}
        quiet: Dict[str, Any] = {'warn_on_full_buffer': False} if sys.version_info >= (3, 7) else {}
        self._wakeup = signal.set_wakeup_fd(self._write, **quiet)
        self.fd: int = self._read

    def _note(self, number: int, frame: Any) -> None:
        self._caught.add(number)

    def take(self) -> Set[int]:
        """Empty the pipe and return the numbers that came since the last time."""
        try:
            while len(os.read(self._read, READ_SIZE)) == READ_SIZE:
                pass
        except (BlockingIOError, InterruptedError):
            pass
        caught, self._caught = self._caught, set()
        return caught

    def close(self) -> None:
        """Put back what was there before."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)


def ended_children() -> Iterable[int]:
    """Yield the pids of children that have ended and wait to be reaped, until the caller has reaped all of them."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None:
            return
        yield info.si_pid


def find_survivors(system: str, epoch: int) -> List[int]:
    """Return the pids of living processes on this host that belong to workers of another epoch of this system.

    Their environment tells, so grandchildren behind a wrapper are found, too. Linux; elsewhere EOF ends them. Raises
    OSError if it could not look everywhere, for want of descriptors or memory.
    """
    ours, mine = b'PEPSI_SYSTEM=' + system.encode(), b'PEPSI_EPOCH=%d' % epoch
    found = []
    for name in os.listdir('/proc') if os.path.isdir('/proc/self') else []:
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open('/proc/%s/environ' % name, 'rb') as f:
                    environ = f.read().split(b'\0')
            except OSError as e:  # it has ended, or is somebody else's
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise
                continue
            if ours in environ and mine not in environ:
                found.append(int(name))
    return found


class Heard(NamedTuple):
    """Fact: a worker wrote complete lines, and what is wrong with what follows them, if anything is."""
    worker: Worker
    lines: List[bytes]
    wrong: Optional[str]


class Died(NamedTuple):
    """Fact: a worker has ended and is reaped; `lines` is the last that it wrote."""
    worker: Worker
    status: int
    lines: List[bytes]
    wrong: Optional[str]


class Signalled(NamedTuple):
    """Fact: a signal came."""
    number: int


class Pace:
    """Where the time went since the last line about it."""

    def __init__(self) -> None:
        self.passes = 0
        self.claims = 0
        self.rows = 0  # claimed
        self.claim_s = 0.0  # from asking to the reply, summed
        self.lag_s = 0.0  # the longest turn, without its wait


class Dispatcher:
    """Moves facts to decisions and commands to owners, one turn after the other. The order of a turn is in the
    design note; nothing that is created after *receive* is looked at before the next turn."""

    def __init__(self, config: Config, queue: Any, signals: Any, wait_for_lock: bool = True,
                 start_child: Callable[..., Any] = Child, clock: Callable[[], float] = time.monotonic,
                 selector: Any = None, ended: Callable[[], Iterable[int]] = ended_children,
                 survivors: Callable[[str, int], List[int]] = find_survivors,
                 load: Optional[Callable[[], Config]] = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.config = config
        self._sleep = sleep
        self._load = load or (lambda: config)
        self.queue = queue
        self.signals = signals
        self.pools = {name: Pool(stage) for name, stage in config.stages.items()}
        self.workers: Dict[int, Worker] = {}  # by pid, until they are reaped
        self.outbox = Outbox()
        self.stats = Stats()
        self.timers = Timers()
        self.phase = Phase.SERVING
        self.exit_code = EXIT_OK
        self.inbox: List[Any] = []
        self.now = clock()  # of this turn
        self.turns = 0
        self.pace = Pace()
        self._clock = clock
        self._selector = selector or selectors.DefaultSelector()
        self._start_child = start_child
        self._ended = ended
        self._survivors = survivors
        self._wait_for_lock = wait_for_lock
        self._system = ''
        self._evicted: Set[int] = set()  # workers of an earlier dispatcher that were killed
        self._alone = False  # no worker of an earlier dispatcher lives on this host
        self._swept = False  # rows without an owner were reset on this session
        self._revive = False  # a retry is wanted
        self._sweep = False  # ... with a sweep
        self._sweeping = False  # the revive under way is one
        self._flush = False  # statistics are to be written
        self._resting: Set[int] = set()  # ids that re-enter their own stage, for RETRY_GAP_S
        self._wants: List[Want] = []  # of the claim under way
        self._settled_at = -math.inf  # when outcomes were sent
        self._below_at = 0.0  # when a claim may start from the beginning again
        self._empty_claims = 0  # in a row
        self._failures = collections.Counter()  # type: Any  # of operations, in a row, by where
        self._troubles: Dict[str, Tuple[float, Set[str]]] = {}  # what the log says is wrong now, and since when
        self._flush_after = 0.0  # not sooner: it has failed
        self._holder = ''
        self._revived_at = self._flushed_at = self._asked_at = self.now
        self._sweep_at = 0.0  # when the next sweep at a heartbeat is due
        self._strangers: Set[str] = set()  # stages without a section that have pending rows, as last seen
        self._seek = False  # they are to be looked for
        self._calls, self._calls_since = 0, -math.inf  # notifications, of late
        self._came = 0  # rows claimed since 'hush' was set
        self._peek_s = LOOK_GAP_S[0]  # before we look again by ourselves
        self._silent = False  # not all who insert notify: we look by ourselves
        self._hush: Optional[bool] = None  # that is to be changed
        self._queue_fd: Optional[Tuple[int, bool]] = None
        self._facts = {Heard: self._heard, Died: self._died, Signalled: self._signalled, Reply: self._replied,
                       Lost: self._lost, Waiting: self._waiting, Taken: self._taken, Replaced: self._replaced,
                       Failure: self._failed}  # type: Dict[type, Callable[[Any], None]]
        self._replies = {'claim': self._claimed, 'settle': self._settled, 'exchange': self._exchanged,
                         'revive': self._revived, 'flush': self._flushed, 'strangers': self._met_strangers,
                         'hush': self._hushed}  # type: Dict[str, Callable[[Any], None]]
        self._due = {'watchdog': self._watchdog, 'idle': self._idle, 'grace': self._grace, 'eof': self._end_of_file,
                     'cooldown': self._cooled, 'rest': self._rested}  # type: Dict[str, Callable[[Any], None]]
        self._selector.register(signals.fd, selectors.EVENT_READ, signals)
        self._paced_at, self._paced_turns = self.now, 0
        self.timers.set('heartbeat', self.now + config.poll_interval_s)
        if log.isEnabledFor(logging.DEBUG):
            self._on_pace()

    # the loop

    def run(self) -> int:
        """Turn until stopped. Returns the exit code; leaves no child, whatever happens."""
        log.info('started pepsi-dispatch %s pid=%d config=%s stages=%d workers<=%d', __version__, os.getpid(),
                 printable(os.path.abspath(self.config.file)), len(self.pools),
                 sum(p.config.parallelism for p in self.pools.values()))
        try:
            while self.phase is not Phase.STOPPED:
                self.turn()
        finally:
            self.close()
        log.info('stopped pepsi-dispatch pid=%d exit=%d', os.getpid(), self.exit_code)
        return self.exit_code

    def turn(self) -> None:
        """Do one turn of the loop."""
        self.turns += 1
        events = self.wait()
        self.receive(events)
        self.digest()
        self.hand()
        self.ask()
        self.maintain()

    def wait(self) -> List[Any]:
        """Sleep until something happens or the next deadline; read the clock. The only place that does either."""
        when = self.queue.deadline
        following = self.timers.next()
        if following is not None and following < when:
            when = following
        clock = self._clock()
        self.pace.lag_s = max(self.pace.lag_s, clock - self.now)
        if clock - self.now > STALL_S:  # we were stopped in the middle of a turn: what it handed was handed just now
            for worker in self.workers.values():
                if worker.head_since == self.now:
                    worker.head_since = clock
        timeout_s = min(max(0.0, when - clock), LONGEST_WAIT_S)
        nap_s = 0.0 if self.inbox else min(self._nap_s(), timeout_s)
        if nap_s:
            self._sleep(nap_s)
            timeout_s -= nap_s
        events = self._selector.select(0 if self.inbox else timeout_s)
        self.now = self._clock()
        return events

    def _nap_s(self) -> float:
        """How long to sleep whatever happens, so that a turn takes several answers: until the worker with the least to
        do has done half of it, and not where that is little."""
        nap_s = 0.0
        for worker in self.workers.values():
            left, average_s = len(worker.inflight), worker.pool.average_s
            if left:
                if left < NAP_LEFT or average_s is None:
                    return 0.0
                nap_s = min(nap_s or NAP_S, left * average_s / 2)
        return nap_s

    def receive(self, events: Iterable[Tuple[Any, int]]) -> None:
        """Do the reading and the writing that is possible now; put what came into the inbox."""
        readable = False
        for key, _ in events:
            owner = key.data
            if owner is self.queue:
                readable = True
            elif owner is self.signals:
                self.inbox.extend(Signalled(number) for number in sorted(owner.take()))
            elif key.fd == owner.child.stdout:
                self.inbox.append(Heard(owner, *owner.receive()))
            elif owner.flush():
                self._unwatch(key.fd)
        if readable or self.now >= self.queue.deadline:  # I4: a reply that is here beats its deadline
            self._from_queue(self.queue.receive())
            self._from_queue(self.queue.tick())
        for pid in self._ended():
            worker = self.workers.get(pid)
            if worker is None:  # adopted: we may be process 1
                os.waitpid(pid, 0)
                continue
            status = worker.bury()
            self.inbox.append(Died(worker, status, *worker.receive(DRAIN_LIMIT)))

    def digest(self) -> None:
        """Turn facts into outcomes and wishes, then serve the timers that are due."""
        inbox, self.inbox = self.inbox, []
        for fact in inbox:
            self._facts[type(fact)](fact)
        calls = self.queue.rung()
        if calls:
            self._called()
            self._count_calls(calls)
        for key in self.timers.take(self.now):
            if isinstance(key, tuple):
                self._due[key[0]](key[1])
            else:
                getattr(self, '_on_' + key)()

    def _called(self) -> None:
        """Somebody has made rows pending or paused, or may have: look for them."""
        for pool in self.pools.values():
            pool.look()
        # After the claim, which somebody may wait for; and with its gap: a stream of calls must leave room for claims.
        self._retry_at(self.now + LOOK_GAP_S[0])

    def _count_calls(self, calls: int) -> None:
        """Where notifications come thick, have those who send them be silent."""
        if self.now > self._calls_since + THICK_S:
            self._calls, self._calls_since = 0, self.now
        self._calls += calls
        if self._calls >= THICK and not self._silent and 'hush' not in self.timers:
            self._hush = True

    def _from_queue(self, facts: List[Any]) -> None:
        """Take facts of the queue, and have the selector follow its descriptor, which changes while it connects."""
        self.inbox.extend(facts)
        fd = self.queue.fd
        wanted = None if fd is None else (fd, self.queue.writing)
        if wanted != self._queue_fd or self.queue.link is Link.OPENING:
            if self._queue_fd is not None:
                self._selector.unregister(self._queue_fd[0])
            if wanted is not None:
                self._selector.register(fd, selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted[1] else 0),
                                        self.queue)
            self._queue_fd = wanted

    # facts: workers

    def _heard(self, fact: Heard) -> None:
        worker = fact.worker
        self._take_answers(worker, fact.lines, fact.wrong)
        if worker.eof:
            self._unwatch(worker.child.stdout)
            if worker.alive() and (worker.inflight or worker.state is not WorkerState.LEAVING):
                self.timers.soonest(('eof', worker.pid), self.now + EOF_GRACE_S)

    def _take_answers(self, worker: Worker, lines: List[bytes], wrong: Optional[str]) -> None:
        """Match lines to ids (I3); the first that is no answer, or what is `wrong` after them, dooms the worker."""
        try:
            for line in lines:
                self._take_answer(worker, *worker.answer(line, self.now))
            if wrong:
                raise Violation(wrong)
        except Violation as e:
            self._doom(worker, Row.FAILED, 'protocol: %s' % e, None)
        if not worker.inflight and worker.state is WorkerState.FINISHING:
            log.debug('recycling worker %d stage=%s after %d messages', worker.pid, quoted(worker.pool.config.name),
                      worker.handed)
            self._let_go(worker)
        elif not worker.inflight and worker.state is WorkerState.SERVING:
            self.timers.soonest(('idle', worker.pid),
                                worker.idle_since + worker.pool.config.worker_idle_timeout_s)

    def _take_answer(self, worker: Worker, id: int, answer: Answer, seconds: float) -> None:
        pool = worker.pool
        self.pace.passes += 1
        pool.passed(seconds, worker.answers == 1)
        cooling = pool.breaker.cooling
        pool.breaker.answered(worker.born)
        if cooling:
            log.info('resumed stage=%s: worker %d answered', quoted(pool.config.name), worker.pid)
            pool.look()
            self.timers.set(('cooldown', pool.config.name), pool.breaker.spawn_at)  # now, or when others may be started
        own_s = max(0.0, seconds - sum(s for _, s in answer.fused)) if answer.fused else seconds
        if answer.status:
            error = one_line('status: %d %s' % (answer.status, answer.text))
            outcome = Outcome(id, pool.config.name, Row.FAILED, error, True, 'failed', own_s, answer.fused)
        else:  # what stands here becomes true only if the row says that the worker did nothing
            outcome = Outcome(id, pool.config.name, Row.FAILED, UNFINISHED, True, 'processed', own_s, answer.fused)
        self.outbox.add(outcome)

    def _doom(self, worker: Worker, status: Row, error: str, column: Optional[str]) -> None:
        """Kill a worker that cannot be trusted or does not answer; its head of line will answer for it."""
        error = one_line(error)
        head = worker.inflight[0] if worker.inflight else None
        log.warning('killing worker %d stage=%s id=%s: %s', worker.pid, quoted(worker.pool.config.name), head, error)
        doom = Doom(status, head, error, column)
        if worker.state is WorkerState.GONE:
            worker.doom = worker.doom or doom
        else:
            worker.kill(doom)

    def _died(self, fact: Died) -> None:
        worker, pool = fact.worker, fact.worker.pool
        stage = pool.config.name
        self._take_answers(worker, fact.lines, fact.wrong)
        stopping = self.phase is not Phase.SERVING
        outage = self.queue.link is not Link.READY
        began = bool(worker.inflight) and worker.began()
        how = describe_exit(fact.status, worker.doom is not None or stopping)
        asked = worker.child.stdin is None
        outcomes = judge(stage, list(worker.inflight), began and not outage, worker.doom, how, stopping)
        for outcome in outcomes:
            self.outbox.add(outcome)
        self._forget(worker)
        released = sum(not o.ended for o in outcomes)
        quiet = asked or worker.doom or stopping
        level = logging.DEBUG if asked and not fact.status else logging.INFO if quiet else logging.WARNING
        log.log(level, 'reaped worker %d stage=%s: %s after %s and %d answers%s',
                worker.pid, quoted(stage), how, brief(self.now - worker.born), worker.answers,
                ', its ids go back: %d' % released if released else '')
        if asked or stopping or outage:
            return
        blamed = any(o.ended for o in outcomes)
        started = began or worker.answers > 0 or not worker.handed
        if pool.breaker.died(self.now, blamed, started, worker.answered_at):
            self._cool(pool, 'worker %d %s%s' % (worker.pid, how, '' if started else ' before it read anything'))

    def _forget(self, worker: Worker) -> None:
        """Undo all that a worker's life has set up: descriptors, timers, its place in the pool."""
        self._unwatch(worker.child.stdin)
        self._unwatch(worker.child.stdout)
        worker.child.close_stdin()
        worker.child.close_stdout()
        for kind in ('watchdog', 'idle', 'grace', 'eof'):
            self.timers.cancel((kind, worker.pid))
        del self.workers[worker.pid]
        worker.pool.workers.remove(worker)
        self._drop_if_empty(worker.pool)

    def _unwatch(self, fd: Optional[int]) -> None:
        """Have the selector forget a descriptor that is to be closed, or has nothing more to say."""
        if fd is not None and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _let_go(self, worker: Worker) -> None:
        """Ask a worker to leave: end of file, and SIGKILL after the grace."""
        self._unwatch(worker.child.stdin)
        worker.leave()
        self.timers.set(('grace', worker.pid), self.now + self.config.stop_timeout_s)

    def _cool(self, pool: Pool, why: str) -> None:
        """A stage's breaker has opened: hold nothing of it."""
        stage = pool.config.name
        log.warning('cooling stage=%s for %s: %s', quoted(stage), brief(pool.breaker.until - self.now), why)
        self._give_back(pool)
        self.timers.set(('cooldown', stage), pool.breaker.until)

    # facts: signals

    def _signalled(self, fact: Signalled) -> None:
        if fact.number in (signal.SIGTERM, signal.SIGINT):
            name = signal.Signals(fact.number).name
            if self.phase is Phase.SERVING:
                log.info('stopping on %s: %d workers, %d ids in flight', name, len(self.workers),
                         sum(p.in_flight() for p in self.pools.values()))
                self._stop()
            else:
                log.info('stopping at once on a second %s', name)
                self._kill_all()
        elif fact.number == signal.SIGHUP and self.phase is Phase.SERVING:
            self._reload()
        elif fact.number == signal.SIGUSR1:
            self._report()

    def _reload(self) -> None:
        """Read the configuration again. Changed stages get new workers as the old ones finish; a bad file changes
        nothing."""
        try:
            config = self._load()
        except Failure as e:
            for line in e.lines:
                log.error('%s', line)
            log.error('reload refused: the configuration of before stays in force')
            return
        for line in config.warnings:
            log.warning('%s', line)
        old, self.config = self.config, config._replace(database=self.config.database)
        if config.database != old.database:
            log.warning('DATABASE has changed: that takes a restart')
        everything = config.config_file != old.config_file
        for name, stage in config.stages.items():
            if name not in self.pools:
                self.pools[name] = Pool(stage)
                log.info('reloaded stage=%s: added', quoted(name))
            elif everything or stage != self.pools[name].config:
                log.info('reloaded stage=%s: %s', quoted(name), difference(self.pools[name].config, stage))
                self._renew(self.pools[name], stage)
        for name in [name for name in self.pools if name not in config.stages]:
            log.info('reloaded stage=%s: removed; its rows wait', quoted(name))
            self._renew(self.pools[name], self.pools[name].config._replace(parallelism=0))
            self._drop_if_empty(self.pools[name])
        self.timers.cancel('heartbeat')
        self._on_heartbeat()
        log.info('reloaded %s: %d stages', config.file, len(config.stages))

    def _renew(self, pool: Pool, config: StageConfig) -> None:
        """Give a stage another configuration: what is not handed goes back, its workers finish, new ones follow."""
        self._give_back(pool)
        pool.renew(config)
        self.timers.cancel(('cooldown', config.name))
        for worker in pool.workers:
            worker.finish()
            if worker.inflight:
                self.timers.soonest(('watchdog', worker.pid), worker.head_since + config.max_runtime_s)
            if worker.state is WorkerState.FINISHING and not worker.inflight:
                self._let_go(worker)

    def _drop_if_empty(self, pool: Pool) -> None:
        """Forget the pool of a stage that is no longer configured once its last worker is gone."""
        if pool.config.name not in self.config.stages and not pool.workers:
            del self.pools[pool.config.name]

    def _give_back(self, pool: Pool) -> None:
        """Release the ids that are claimed and not handed."""
        while pool.ready:
            self.outbox.add(Outcome(pool.ready.popleft(), pool.config.name, Row.PENDING, ended=False))

    def _report(self) -> None:
        """Write the state of everything to the log."""
        log.info('state phase=%s link=%s server_process=%s epoch=%s claimed=%d unwritten=%d turns=%d statements=%d%s',
                 self.phase.value, self.queue.link.value, self.queue.backend, self.queue.epoch,
                 sum(len(p.ready) for p in self.pools.values()), len(self.outbox), self.turns, self.queue.statements,
                 ' trouble: ' + '; '.join(sorted(text for _, known in self._troubles.values() for text in known))
                 if self._troubles else '')
        for name, pool in sorted(self.pools.items()):
            cooling = brief(max(0.0, pool.breaker.until - self.now)) if pool.breaker.cooling else 'no'
            log.info('state stage=%s workers=%d/%d in_flight=%d ready=%d room=%d average=%s looking=%s deaths=%d '
                     'cooling=%s', quoted(name), len(pool.workers), pool.config.parallelism, pool.in_flight(),
                     len(pool.ready), pool.room(self.now),
                     'unknown' if pool.average_s is None else brief(pool.average_s), pool.looking, pool.breaker.deaths,
                     cooling)
            for worker in pool.workers:
                log.info('state worker %d stage=%s %s age=%s answers=%d in_flight=%d head=%s since=%s', worker.pid,
                         quoted(name), worker.state.value, brief(self.now - worker.born), worker.answers,
                         len(worker.inflight), worker.inflight[0] if worker.inflight else '-',
                         brief(self.now - worker.head_since) if worker.inflight else '-')
        for when, key in self.timers.pending()[:20]:
            log.info('state timer %s in %s', ' '.join(map(str, key)) if isinstance(key, tuple) else key,
                     brief(max(0.0, when - self.now)))

    def _stop(self) -> None:
        """Claim nothing more, give back what is not handed, ask the workers to leave."""
        self.phase = Phase.STOPPING
        for pool in self.pools.values():
            self._give_back(pool)
        for worker in self.workers.values():
            if worker.alive():
                worker.child.signal(signal.SIGTERM)
                if worker.state is not WorkerState.LEAVING:
                    self._let_go(worker)
        self.timers.set('kill', self.now + self.config.stop_timeout_s)
        self._swept = self._sweeping = False  # rows of workers that end now were not seen by a sweep under way

    def _on_kill(self) -> None:
        if self.workers:
            log.warning('killing %d workers that did not leave within STOP_TIMEOUT', len(self.workers))
        self._kill_all()

    def _kill_all(self) -> None:
        for worker in self.workers.values():
            if worker.state is not WorkerState.GONE:
                worker.kill(None)

    def _abandon(self, code: int) -> None:
        """Stop without another word to the database: it is not ours, or cannot be worked on."""
        self.phase, self.exit_code = Phase.STOPPING, code
        self.queue.close()
        self._from_queue([])
        self._kill_all()
        if not self.workers:
            self.phase = Phase.STOPPED
        self.outbox, self.stats = Outbox(), Stats()
        for pool in self.pools.values():
            pool.ready.clear()

    # facts: the database

    def _taken(self, fact: Taken) -> None:
        first, self._system = not self._system, fact.system
        if first:
            self.stats.flush = fact.flush
            log.info('took over epoch=%d', fact.epoch)
        elif self.stats.sealed and self.stats.sealed['flush'] <= fact.flush:
            self.stats.flushed()
        self._holder = ''
        self._swept = False
        self._silent, self._hush = True, False  # of the session before ours there may be some who are to commit
        self._well('link')
        if first:
            self._on_survivors()

    def _on_survivors(self) -> None:
        """Before any row is reset: end the workers that a dispatcher before us left behind, and see them gone."""
        try:
            survivors = self._survivors(self._system, self.queue.epoch)
        except OSError as e:
            self._ill('looking for earlier workers',
                      'cannot look for workers of an earlier dispatcher: %s; nothing is claimed before'
                      % e.strerror)
            self.timers.set('survivors', self.now + SURVIVORS_POLL_S)
            return
        self._well('looking for earlier workers')
        for pid in survivors:
            if pid not in self._evicted:
                log.warning('killing process %d: a worker of an earlier dispatcher; nothing is claimed while it lives',
                            pid)
            self._evicted.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has gone, or is somebody else's: it will find its input closed
                pass
        self._alone = not survivors
        if survivors:
            self.timers.set('survivors', self.now + SURVIVORS_POLL_S)

    def _lost(self, fact: Lost) -> None:
        for name in ('backoff', 'hush', 'peek'):
            self.timers.cancel(name)
        self._hush = None
        self._swept = False
        self.outbox.lost()
        self._look_again(self._wants)
        self._wants = []
        self._ill('link', 'database away: %s; trying again until it is back' % fact.reason)

    def _waiting(self, fact: Waiting) -> None:
        if not self._holder:
            self.timers.set('nowait', self.now + (NO_WAIT_S if not self._wait_for_lock else math.inf))
        if fact.holder != self._holder:
            log.warning('waiting for the lock of this database: another one has it (%s)', fact.holder)
        self._holder = fact.holder

    def _on_nowait(self) -> None:
        if self._holder:
            log.error('another dispatcher is running (%s)', self._holder)
            self._abandon(EXIT_RUNNING)

    def _replaced(self, fact: Replaced) -> None:
        log.error('another dispatcher has taken over with epoch=%d, ours was %d: killing all workers', fact.epoch,
                  self.queue.epoch)
        self._abandon(EXIT_RUNNING)

    def _failed(self, fact: Failure) -> None:
        for line in fact.lines:
            log.error('%s', line)
        self._abandon(fact.code)

    def _replied(self, fact: Reply) -> None:
        name = fact.name
        where = {'flush': 'writing statistics', 'revive': 'retrying',
                 'strangers': 'looking for stages without a section',
                 'hush': 'silencing triggers'}.get(name, 'the queue')
        if fact.error is None:
            self._failures.pop(where, None)
            self._well(where)
        else:
            first, longest = FAILURE_S
            when = self.now + min(first * 2 ** min(self._failures[where], 20), longest)
            self._failures[where] += 1
            verb = {'exchange': 'settle and claim', 'flush': 'write statistics', 'revive': 'retry',
                    'strangers': 'look for stages without a section', 'hush': 'silence triggers'}.get(name, name)
            self._ill(where, 'cannot %s: %s; trying again until it works' % (verb, complaint(fact.error)))
            if name in ('strangers', 'hush'):
                pass  # in an hour; in HUSH_S
            elif name == 'flush':  # what nobody waits for holds up nothing else
                self._flush, self._flush_after = False, when
            elif name == 'revive' and not self._sweeping:
                self._retry_at(when)
            else:
                self.timers.set('backoff', when)
        self._replies[name](fact.value)

    def _ill(self, where: str, what: str) -> None:
        """Log a trouble with the database once, however often it repeats before all is well there."""
        since, known = self._troubles.setdefault(where, (self.now, set()))
        if what not in known:
            log.warning('%s', what)
        known.add(what)

    def _well(self, where: str) -> None:
        since, known = self._troubles.pop(where, (0.0, set()))
        if known:
            log.info('%s after %s', 'database is back' if where == 'link' else where + ' works again',
                     brief(self.now - since))

    def _claimed(self, rows: Optional[List[Tuple[int, str]]]) -> None:
        wants, self._wants = self._wants, []
        self.pace.claims += 1
        self.pace.claim_s += self.now - self._asked_at
        self.pace.rows += len(rows or ())
        if rows is None:
            self._look_again(wants)
            return
        self._came += len(rows)
        if rows:
            self._peek_s = LOOK_GAP_S[0]
        ids: Dict[str, List[int]] = {want.stage: [] for want in wants}
        for id, stage in rows:
            if stage in ids:
                ids[stage].append(id)
        for want in wants:
            mine, room = sorted(ids[want.stage]), 0
            if want.stage in self.pools and self.phase is Phase.SERVING:
                pool = self.pools[want.stage]
                room = pool.room(self.now)
                pool.claimed(want, mine, room)
            for id in mine[room:]:  # the stage cools down since; rows were moved here this very moment
                self.outbox.add(Outcome(id, want.stage, Row.PENDING, ended=False))
        if any(want.floor == FIRST_ID for want in wants):  # it may have read dead entries; see the claim's measurements
            self._below_at = self.now + min(max(BELOW_GAP_S[0], 10 * (self.now - self._asked_at)), BELOW_GAP_S[1])
        if any(pool.below for pool in self.pools.values()):
            self.timers.soonest('below', self._below_at)
        if self.queue.partial:
            self._look_again(wants)
        elif self.queue.skipping():
            self.timers.soonest('locked', self.now + SKIP_LOCKED_S)
        self.timers.soonest('locked', self.queue.parked_until())
        self._empty_claims = 0 if rows else self._empty_claims + 1
        if self._empty_claims > 1:
            first, longest = LOOK_GAP_S
            self.timers.set('look', self.now + min(first * 2 ** min(self._empty_claims - 2, 20), longest))

    def _exchanged(self, both: Optional[Tuple[List[Settled], Optional[List[Tuple[int, str]]]]]) -> None:
        settled, rows = both or (None, None)
        self._settled(settled)
        self._claimed(rows)

    def _look_again(self, wants: Sequence[Want]) -> None:
        for want in wants:
            if want.stage in self.pools:
                self.pools[want.stage].look()

    def _settled(self, settled: Optional[List[Settled]]) -> None:
        if settled is None:
            self.outbox.unsent()
            return
        for row in settled:
            outcome = self.outbox.confirm(row.id)
            if row.written and row.status in FAILED:
                log.info('set %d %s stage=%s: %s', row.id, row.status, quoted(outcome.stage), outcome.error)
                if outcome.column == 'processed':
                    outcome = outcome._replace(column=None)
            self.stats.count(outcome, row.status not in IN_PIPELINE)
            if row.status == PENDING:
                self._appeared(row, outcome)
            elif row.status == PAUSED and row.due_s is not None:
                if row.due_s < RETRY_GAP_S:
                    self._rest(row.id)
                else:
                    self._retry_at(self.now + row.due_s)
        if self.outbox.sent:
            self.timers.set('resend', self.outbox.defer(self.now))

    def _appeared(self, row: Settled, outcome: Outcome) -> None:
        """A row that we gave up is pending: there is a reason to look for it."""
        pool = self.pools.get(row.stage or '')
        if pool is None:
            if row.stage not in self._strangers:
                self.timers.soonest('strangers', self.now)
        elif row.stage == outcome.stage and outcome.ended and not row.written:  # it re-enters its own stage
            self._rest(row.id)
        else:
            pool.look(row.id)

    def _on_strangers(self) -> None:
        self._seek = True
        self.timers.set('strangers', self.now + STRANGERS_S)

    def _met_strangers(self, rows: Optional[List[Tuple[str]]]) -> None:
        if rows is None:
            return
        found = {stage for stage, in rows if stage not in self.pools}
        if found - self._strangers:
            log.warning('rows wait at %s', without_section(sorted(found)))
        self._strangers = found

    def _rest(self, id: int) -> None:
        """Hold an id for a while that would run again at once: a loop must not be a hot one."""
        self._resting.add(id)
        self.timers.set(('rest', id), self.now + RETRY_GAP_S)

    def _rested(self, id: int) -> None:
        self._resting.discard(id)
        self._revive = True  # its row is paused, or somebody may have paused it meanwhile
        for pool in self.pools.values():
            pool.look(id)

    def _retry_at(self, when: float) -> None:
        """Have paused rows retried at `when`, but not sooner than RETRY_GAP_S after the last time."""
        self.timers.soonest('due', max(when, self._revived_at + RETRY_GAP_S))

    def _hushed(self, silent: Optional[bool]) -> None:
        if silent is None:  # it failed, and who knows
            silent = True
        if silent is not self._silent:
            log.debug('those who insert wait for one another to notify: looking by ourselves' if silent
                      else 'waiting for notifications')
            self._silent = silent
        self._came, self._hush = 0, None
        self.timers.set('hush', self.now + HUSH_S)
        if self._silent:
            self.timers.soonest('peek', self.now + LOOK_GAP_S[0])
        else:
            self.timers.cancel('peek')
        self._called()  # for what came while nobody notified, or before this session

    def _revived(self, rows: Optional[List[Tuple[str, Optional[str], int, Optional[float]]]]) -> None:
        self._revived_at = self.now
        if rows is None:
            self._revive, self._sweep = self._sweeping, self._sweep or self._sweeping
            return
        count: Any = collections.Counter()
        for what, stage, number, next_s in rows:
            count[what] += number
            if stage in self.pools:
                self.pools[stage].look()
            if next_s is not None:
                self._retry_at(self.now + next_s)
        if count['reset']:
            log.info('reset %d rows that were running without an owner', count['reset'])
        if count['lost'] > count['reset']:
            self.timers.soonest('sweep', self.now + SWEEP_AGAIN_S)
        self.timers.soonest('sweep' if self._sweeping else 'locked', self.queue.parked_until())
        if count['ripe'] > count['retried']:
            self._retry_at(self.now + SWEEP_AGAIN_S)
        elif count['ripe'] == RETRY_LIMIT:
            self._retry_at(self.now)
        if self._sweeping and not count['lock']:
            self._from_queue(self.queue.give_up('the session has lost its lock'))
            return
        if self._sweeping:
            self._sweep_at = self.now + (self.now - self._asked_at) / SWEEP_SHARE
            self._swept, self._sweeping = True, False
            if 'strangers' not in self.timers:
                self.timers.set('strangers', self.now + STRANGERS_FIRST_S)

    def _flushed(self, rows: Optional[List[Tuple[Optional[int], int, int]]]) -> None:
        if rows is None:
            return
        self._flush = False
        self._flushed_at = self.now
        if not rows or (rows[0][0] is None and rows[0][1] != self.queue.epoch):
            self._replaced(Replaced(rows[0][1] if rows else 0))
        self.stats.flushed()  # now, or before: the number tells

    # timers

    def _on_heartbeat(self) -> None:
        self.timers.set('heartbeat', self.now + max(self.config.poll_interval_s, LEAST_INTERVAL_S))
        for pool in self.pools.values():
            pool.look()
        self._revive = True
        self._sweep = self._sweep or self.now >= self._sweep_at

    def _on_pace(self) -> None:
        """Tell an operator with -v where the time goes; nothing while nothing happens."""
        pace, past_s = self.pace, max(self.now - self._paced_at, 0.001)
        if pace.passes or pace.rows:
            log.debug('paced %.1f passes/s, %.1f rows a claim, %.1f ms a claim, %.1f turns/s, lag at most %.1f ms',
                      pace.passes / past_s, pace.rows / max(pace.claims, 1), 1000 * pace.claim_s / max(pace.claims, 1),
                      (self.turns - self._paced_turns) / past_s, 1000 * pace.lag_s)
        self.pace, self._paced_at, self._paced_turns = Pace(), self.now, self.turns
        self.timers.set('pace', self.now + max(self.config.stats_interval_s, LEAST_INTERVAL_S))

    def _on_due(self) -> None:
        self._revive = True

    def _on_sweep(self) -> None:
        self._revive = self._sweep = True

    def _on_resend(self) -> None:
        self.timers.set('resend', self.outbox.due(self.now))

    def _on_stats(self) -> None:
        self._flush = True

    def _on_locked(self) -> None:
        """Rows that were locked or parked are worth another look."""
        self._retry_at(self.now)
        for pool in self.pools.values():
            pool.look()

    def _on_below(self) -> None:
        for pool in self.pools.values():
            pool.looking = pool.looking or pool.below

    def _on_hush(self) -> None:
        if self._silent:
            self._hush = self._came / HUSH_S >= THICK / THICK_S  # messages come as thick as before

    def _on_peek(self) -> None:
        gap_s = min(self._peek_s, LOOK_GAP_S[1] if self.queue.hushes else PEEK_S)
        self.timers.set('peek', self.now + gap_s)
        self._peek_s = 2 * gap_s
        self._called()

    def _on_gather(self) -> None:
        """Outcomes have waited long enough for others."""

    def _on_look(self) -> None:
        """The gap after claims that found nothing is over."""

    def _on_backoff(self) -> None:
        """The delay after a statement that failed is over."""

    def _on_pack(self) -> None:
        """Ids wait for the speed of a stage to show: hand looks again."""

    def _watchdog(self, pid: int) -> None:
        worker = self.workers[pid]
        if not worker.alive():
            return
        self._heard(Heard(worker, *worker.receive()))  # I4
        if not worker.inflight or not worker.alive():
            return
        limit_s = worker.pool.config.max_runtime_s
        if self.now >= worker.head_since + limit_s:
            self._doom(worker, Row.TIMEOUT, 'timeout: no answer within %s' % brief(limit_s), 'timeouts')
        else:
            self.timers.set(('watchdog', pid), worker.head_since + limit_s)

    def _idle(self, pid: int) -> None:
        worker = self.workers[pid]
        if worker.inflight or worker.state is not WorkerState.SERVING:
            return
        when = worker.idle_since + worker.pool.config.worker_idle_timeout_s
        if worker.pool.ready:  # it may get them yet: retiring and handing are one decision
            when = self.now + PROBE_S
        if self.now < when:
            self.timers.set(('idle', pid), when)
        else:
            log.debug('retiring worker %d stage=%s', pid, quoted(worker.pool.config.name))
            self._let_go(worker)

    def _grace(self, pid: int) -> None:
        worker = self.workers[pid]
        if worker.state is WorkerState.LEAVING:
            if self.phase is Phase.SERVING:
                log.warning('killing worker %d stage=%s: it did not leave within STOP_TIMEOUT', pid,
                            quoted(worker.pool.config.name))
            worker.kill(None)

    def _end_of_file(self, pid: int) -> None:
        worker = self.workers[pid]
        if worker.alive():
            self._doom(worker, Row.FAILED, 'protocol: it closed its standard output and lives on', None)

    def _cooled(self, stage: str) -> None:
        if stage in self.pools:
            self.pools[stage].look()

    # commands

    def hand(self) -> None:
        """Give ready ids to workers. Nothing is handed out while the session is away."""
        if self.phase is not Phase.SERVING or self.queue.link is not Link.READY:
            return
        for pool in self.pools.values():
            if pool.ready:
                self._hand(pool)

    def _hand(self, pool: Pool) -> None:
        touched: List[Worker] = []
        for worker in pool.workers:
            worker.watch_start(self.now)
        while pool.ready:
            chosen, number = pool.choose(self.now)
            if chosen is None and number:
                chosen = self._spawn(pool)
            if chosen is None:
                break
            chosen.hand([pool.ready.popleft() for _ in range(min(number, len(pool.ready)))], self.now)
            if chosen not in touched:
                touched.append(chosen)
        for worker in touched:  # one write each
            if not worker.flush() and worker.child.stdin not in self._selector.get_map():
                self._selector.register(worker.child.stdin, selectors.EVENT_WRITE, worker)
            self.timers.soonest(('watchdog', worker.pid), worker.head_since + pool.config.max_runtime_s)
        if pool.ready:
            self.timers.soonest('pack', self.now + (PROBE_S if pool.average_s is None else FILL_S))

    def _spawn(self, pool: Pool) -> Optional[Worker]:
        """Start a worker. None, and the stage cools down, if that fails."""
        stage = pool.config.name
        environ = dict(os.environ, PEPSI_STAGE=native(stage), PEPSI_EPOCH=str(self.queue.epoch),
                       PEPSI_SYSTEM=self._system, PGAPPNAME=native('pepsi/' + stage), PYTHONUNBUFFERED='1')
        argv = [native(word) for word in pool.config.program + ('worker', '-c', self.config.config_file)]
        try:
            child = self._start_child(argv, environ)
        except (OSError, ValueError) as e:
            if pool.breaker.cannot_start(self.now):
                self._cool(pool, 'cannot start %s: %s' % (printable(argv[0]), getattr(e, 'strerror', None) or e))
            return None
        worker = Worker(pool, child, self.now)
        self.workers[worker.pid] = worker
        pool.workers.append(worker)
        self._selector.register(child.stdout, selectors.EVENT_READ, worker)
        log.debug('spawned worker %d stage=%s', worker.pid, quoted(stage))
        return worker

    def held(self) -> List[int]:
        """All ids that must not be claimed or retried (I1)."""
        ids = list(self.outbox.ids())
        ids.extend(self._resting)
        for pool in self.pools.values():
            ids.extend(pool.ready)
        for worker in self.workers.values():
            ids.extend(worker.inflight)
        return ids

    def ask(self) -> None:
        """Start the statement that matters most, if the session is free."""
        queue = self.queue
        if queue.busy() or 'backoff' in self.timers:
            return
        self._asked_at = self.now
        rooms = self._rooms()
        if self._hush is not None and self._swept and self.phase is Phase.SERVING:
            silent, self._hush = self._hush, None
            self._from_queue(queue.hush(silent))
        elif self.outbox.fresh and not rooms and not self._gathering():
            self._settled_at = self.now
            self._from_queue(queue.settle(self.outbox.take(SETTLE_LIMIT)))
        elif not self._swept:
            if self._alone and (self.phase is Phase.SERVING or not self.workers):
                self._ask_revive(True)
        elif self._revive and self.phase is Phase.SERVING:
            self._ask_revive(self._sweep)
        elif self._seek and self.phase is Phase.SERVING:
            self._seek = False
            self._from_queue(queue.strangers(self.pools))
        elif self._flush and self.stats:
            self._from_queue(queue.flush(self.stats.seal(queue.epoch)))
        elif rooms:
            self._wants = [pool.want(room, self.now >= self._below_at) for pool, room in rooms]
            held = self.held()
            if self.outbox.fresh:
                self._settled_at = self.now
                self._from_queue(queue.exchange(self.outbox.take(SETTLE_LIMIT), self._wants, held))
            else:
                self._from_queue(queue.claim(self._wants, held))

    def _gathering(self) -> bool:
        """Whether outcomes wait for more to share their statement: not for long, only while more is at work than has
        ended, and if none of them is a failure or goes back."""
        when = self._settled_at + SETTLE_GAP_S
        if self.now >= when or not self._swept or self.phase is not Phase.SERVING or self.outbox.urgent() \
                or sum(len(worker.inflight) for worker in self.workers.values()) < len(self.outbox.fresh):
            return False
        self.timers.soonest('gather', when)
        return True

    def _ask_revive(self, sweep: bool) -> None:
        self._revive, self._sweep, self._sweeping = False, False, sweep
        self._from_queue(self.queue.revive(self.held(), sweep))

    def _rooms(self) -> List[Tuple[Pool, int]]:
        """The pools that are worth a claim now, and how many ids each can take."""
        if self.phase is not Phase.SERVING or not self._swept or 'look' in self.timers:
            return []
        rooms = [(pool, pool.worth_claiming(self.now) - self.outbox.unwritten(pool.config.name))
                 for pool in self.pools.values() if pool.looking]
        return [(pool, room) for pool, room in rooms if room > 0]

    def maintain(self) -> None:
        """Arm what follows from the state that this turn leaves behind; finish a stop."""
        if self.stats and not self._flush:
            quiet = not any(worker.inflight for worker in self.workers.values())
            interval_s = IDLE_FLUSH_S if quiet else max(self.config.stats_interval_s, LEAST_INTERVAL_S)
            self.timers.soonest('stats', max(self._flushed_at + interval_s, self._flush_after))
        if self.phase is Phase.STOPPING and not self.workers:
            self._finish()

    def _finish(self) -> None:
        """All workers are gone: write what is left, then end."""
        if self.exit_code:
            self.phase = Phase.STOPPED
            return
        if 'quit' not in self.timers:
            self.timers.set('quit', self.now + FINISH_S)
            self.timers.cancel('kill')
        self._flush = bool(self.stats) and self.now >= self._flush_after
        away = self.queue.link is not Link.READY
        if not self.outbox and not self.stats and (away or (self._swept and not self.queue.busy())):
            self.phase = Phase.STOPPED

    def _on_quit(self) -> None:
        ids = sorted(self.outbox.ids())
        log.warning('the database did not take everything in time: %d outcomes are lost%s%s; the next start resets '
                    'what is still running', len(ids), ', ids ' + ' '.join(map(str, ids[:50])) if ids else '',
                    ', statistics not written' if self.stats else '')
        self.phase = Phase.STOPPED

    def close(self) -> None:
        """Leave nothing behind: children, descriptors, signal handlers. Blocks until killed children are reaped."""
        self.queue.close()
        self._kill_all()
        for worker in list(self.workers.values()):
            worker.bury()
            worker.child.close_stdin()
            worker.child.close_stdout()
        self._selector.close()
        self.signals.close()


UNFINISHED = 'unfinished: the worker reported success and left the row as it was'


# -- commands ----------------------------------------------------------------------------------------------------------

def run(config: Config, wait_for_lock: bool = True) -> int:
    """Run the dispatcher in the foreground until it is told to stop. Returns the exit code."""
    try:  # what importing needed and does not need any more: a fifth of our memory
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        pass
    return Dispatcher(config, Queue(config.database), Signals(), wait_for_lock,
                      load=lambda: load_config(config.file)).run()


class Session:
    """A short, blocking session of a one-shot command; a context manager that commits, or rolls back on an error."""

    def __init__(self, config: Config, command: str) -> None:
        """Connect. Raises Failure (EXIT_UNAVAILABLE)."""
        options: Dict[str, Any] = {'connect_timeout': 10, 'client_encoding': 'UTF8'}
        try:
            options.update(psycopg2.extensions.parse_dsn(config.database))
            options['application_name'] = 'pepsi-dispatch ' + command
            self.conn = psycopg2.connect(**options)
            self.ask("SET lock_timeout = '3s'")
            self.conn.commit()
        except psycopg2.Error as e:
            raise Failure(EXIT_UNAVAILABLE, 'cannot reach the database: %s' % complaint(e)) from None

    def __enter__(self) -> 'Session':
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self.conn.commit()
        except psycopg2.Error as e:
            raise failure_of(e) from None
        finally:
            self.conn.close()
        if isinstance(error, psycopg2.Error):
            raise failure_of(error) from None

    def ask(self, sql: str, **params: Any) -> List[Tuple[Any, ...]]:
        """Run a statement and return its rows. Raises psycopg2.Error."""
        with self.conn.cursor() as cursor:
            cursor.execute(sql, params or None)
            return cursor.fetchall() if cursor.description else []


def failure_of(e: psycopg2.Error) -> Failure:
    """What a failed statement of a one-shot command means to the operator."""
    if e.pgcode in MISSING:
        return Failure(EXIT_CONFIG, unusable(e))
    if e.pgcode == LOCKED:
        return Failure(EXIT_UNAVAILABLE, 'a table is locked by another session (see pg_locks); nothing was changed, '
                                         'try again')
    lasting = (e.pgcode or '')[:2] in ('22', '23', '42')  # data, constraints, names and rights
    return Failure(EXIT_CONFIG if lasting else EXIT_UNAVAILABLE, 'the database refused: %s; nothing was changed'
                   % complaint(e))


def init(config: Config) -> int:
    """Create what is missing, in one transaction. Raises Failure if the database cannot be reached or refuses."""
    with Session(config, 'init') as session:
        session.ask(SCHEMA)
    log.info('created what was missing')
    return EXIT_OK


def requeue(config: Config, ids: Optional[Sequence[int]], stage: Optional[str], dry_run: bool) -> int:
    """Make failed and timed out messages pending again: these ids, those of a stage, or all. Prints how many."""
    params = {'every': ids is None and stage is None, 'stage': stage, 'ids': None if ids is None else array(ids)}
    with Session(config, 'requeue') as session:
        session.ask("SELECT set_config('pepsi.dispatcher', 'on', true)")  # one NOTIFY, not one for each row
        if dry_run:
            [(number,)] = session.ask('SELECT count(*) FROM queue WHERE ' + REQUEUED, **params)
        else:
            number = len(session.ask(REQUEUE, **params))
            session.ask('NOTIFY ' + CHANNEL)
    of = '' if ids is None else ' of %d' % len(set(ids))
    print('%s %d%s message%s%s' % (
        'would requeue' if dry_run else 'requeued', number, of, '' if (len(set(ids)) if ids else number) == 1 else 's',
        '; the others are not failed or timeout' if ids and number < len(set(ids)) else
        ': none at stage %s is failed or timeout' % quoted(stage) if stage is not None and not number else ''))
    return EXIT_OK


def read_ids(words: Iterable[str]) -> List[int]:
    """Turn words into ids; `-` stands for those on standard input. Raises Failure (EXIT_USAGE)."""
    ids: List[int] = []
    for word in words:
        for text in sys.stdin.read().split() if word == '-' else [word]:
            if not re.match(r'-?[0-9]{1,19}\Z', text) or not FIRST_ID <= int(text) <= LAST_ID:
                raise Failure(EXIT_USAGE, "not an id: '%s'" % printable(text))
            ids.append(int(text))
    return ids


def sample() -> int:
    """Print a commented configuration and a section for supervisord, from the table of options."""
    print('# pepsi.conf: what stands behind a # is the default. Times: 250 ms, 5 s, 5 min, 1.5 h, 1 d, forever.')
    for kind, options in OPTIONS.items():
        print('\n[%s]' % (kind + 'example' if kind.endswith('-') else kind))
        for option in options:
            print('# %s' % option.about)
            if option.default is None:
                print('%s = /usr/local/lib/pepsi/example' % option.name)
            else:
                print(('#%s = %s' % (option.name, default_of(option))).rstrip())
    print(SUPERVISOR % {'wait': math.ceil(parse_config('', '').stop_timeout_s + FINISH_S) + 3})
    return EXIT_OK


SUPERVISOR = """
# For supervisord, in a file of its own, without the leading '; '. stopwaitsecs is longer than STOP_TIMEOUT and what is
# written after it. The dispatcher stops its workers itself; killasgroup is for the case that it cannot.
;
; [program:pepsi-dispatch]
; command=pepsi-dispatch -c /etc/pepsi/pepsi.conf run
; autorestart=true
; startretries=1000000
; stopsignal=TERM
; stopwaitsecs=%(wait)d
; stopasgroup=false
; killasgroup=true
; redirect_stderr=true
; stdout_logfile=/var/log/pepsi-dispatch.log"""


# status

def look_at(session: Session, config: Config) -> Dict[str, Any]:
    """Return what `status` shows: the keys of `--json`, and `counters`: the rows of stage_stats by stage.

    Reads the partial indexes only: the cost grows with what is not done, not with what is. Raises psycopg2.Error.
    """
    dispatcher = None
    for pid, name, address, since, epoch in session.ask(HOLDER, key=LOCK_KEY):
        match = re.match(r'pepsi-dispatch ([0-9]+)@(.*)', name or '')
        dispatcher = {'pid': int(match.group(1)) if match else pid, 'host': match.group(2) if match else address,
                      'since': since, 'epoch': epoch}
    counters = {stage: dict(zip(COLUMNS + ('processing_seconds',), row))
                for stage, *row in session.ask(STATUS_COUNTERS)}
    stages: Dict[str, Dict[str, Any]] = {}
    rows = session.ask(STATUS_ROWS)
    for stage in sorted(set(config.stages) | set(counters) | {row[0] for row in rows}):
        counter = counters.get(stage, {})
        stages[stage] = {'pending': 0, 'running': 0, 'paused': 0, 'failed': 0, 'timeout': 0,
                         'oldest_pending_seconds': None, 'workers': 0, 'processed': counter.get('processed', 0),
                         'processing_seconds': counter.get('processing_seconds', 0.0)}
    for stage, status, number in rows:
        stages[stage][status] = number
    waiting = array([stage for stage in stages if stages[stage]['pending']])
    for stage, seconds in session.ask(STATUS_OLDEST, stages=waiting):
        stages[stage]['oldest_pending_seconds'] = seconds
    for name, number in session.ask(STATUS_WORKERS):
        for stage in stages:
            if name in session_names(stage):
                stages[stage]['workers'] = number
    [(total, messages, due_s)] = session.ask(STATUS_TOTALS)
    return {'dispatcher': dispatcher, 'stages': stages, 'totals': {'stages': total, 'messages': messages},
            'next_due_seconds': due_s, 'counters': counters}


def session_names(stage: str) -> Tuple[str, str]:
    """What the server makes of the PGAPPNAME of a stage's worker: 63 bytes, what is not ASCII replaced: by question
    marks before PostgreSQL 16, escaped since."""
    name = ('pepsi/' + stage).encode('utf-8')[:63]
    plain = [chr(byte) if 32 <= byte < 127 else None for byte in name]
    return (''.join(c or '?' for c in plain),
            ''.join(c or '\\x%02x' % byte for c, byte in zip(plain, name))[:63])


STATUSES = ('pending', 'running', 'paused', 'failed', 'timeout')


def as_json(seen: Dict[str, Any]) -> str:
    """One object on one line."""
    return json.dumps({key: seen[key] for key in seen if key != 'counters'}, sort_keys=True)


def as_prometheus(seen: Dict[str, Any]) -> str:
    """The text exposition format, for the textfile collector of node_exporter."""
    def label(text: str) -> str:
        for character, escaped in (('\\', r'\\'), ('"', r'\"'), ('\n', r'\n')):
            text = text.replace(character, escaped)
        return text

    lines: List[str] = []

    def metric(name: str, kind: str, about: str, samples: Iterable[Tuple[str, Any]]) -> None:
        lines.append('# HELP %s %s' % (name, about))
        lines.append('# TYPE %s %s' % (name, kind))
        lines.extend('%s%s %s' % (name, labels, repr(value)) for labels, value in samples if value is not None)

    stages, counters = seen['stages'], seen['counters']
    metric('pepsi_queue_messages', 'gauge', 'Messages by stage and status, final success left out.',
           [('{stage="%s",status="%s"}' % (label(s), status), stages[s][status])
            for s in stages for status in STATUSES])
    metric('pepsi_oldest_pending_seconds', 'gauge', 'How long the first pending message of a stage has been pending.',
           [('{stage="%s"}' % label(s), stages[s]['oldest_pending_seconds']) for s in stages])
    for column, about in (('processed', 'Passes that ended in success.'), ('failed', 'Passes that ended in failure.'),
                          ('timeouts', 'Workers killed by the watchdog.'), ('crashes', 'Workers that died at work.'),
                          ('processing_seconds', 'Seconds from head of line to answer.')):
        metric('pepsi_stage_%s_total' % column, 'counter', about,
               [('{stage="%s"}' % label(s), counters[s][column]) for s in counters])
    metric('pepsi_stages_total', 'counter', 'Passes ended, all stages together.', [('', seen['totals']['stages'])])
    metric('pepsi_messages_total', 'counter', 'Messages that left the pipeline.', [('', seen['totals']['messages'])])
    metric('pepsi_dispatcher_up', 'gauge', 'Whether a dispatcher holds the lock.',
           [('', int(seen['dispatcher'] is not None))])
    return '\n'.join(lines)


def as_table(seen: Dict[str, Any], rates: Dict[str, float], colour: bool, columns: int = 120, rows: int = 0) -> str:
    """For people. `rates` in passes a second by stage, empty: not known; `rows` of the screen, 0: no matter."""
    def paint(code: str, text: str) -> str:
        return '\033[%sm%s\033[0m' % (code, text) if colour and text.strip(' 0-') else text

    d = seen['dispatcher']
    lines = [paint('32', 'dispatcher pid %s on %s, epoch %s, connected since %s' % (
                 d['pid'], d['host'], d['epoch'], d['since'] or '(not visible to this role)'))
             if d else paint('31;1', 'no dispatcher is running')]
    stages = seen['stages']
    if rows and len(stages) > rows - 5:  # those with the most to see
        shown = sorted(stages, key=lambda stage: -sum(stages[stage][key] for key in STATUSES + ('workers',)))
        stages = {stage: stages[stage] for stage in sorted(shown[:max(rows - 6, 1)])}
    names = {stage: name if len(name) <= 40 else name[:26] + '...' + name[-11:]
             for stage, name in ((stage, quoted(stage)) for stage in stages)}
    width = max([5] + [len(name) for name in names.values()])
    heads = ('PENDING', 'RUNNING', 'PAUSED', 'FAILED', 'TIMEOUT', 'OLDEST', 'WORKERS', 'PROCESSED')
    lines.append(('%-*s' % (width, 'STAGE') + ''.join(' %9s' % head for head in heads)
                  + ('   RATE/s' if rates else '')).rstrip())
    most = max([1] + [row['pending'] for row in stages.values()])
    bar = min(20, columns - width - 92)
    for stage, row in stages.items():
        age = '-' if row['oldest_pending_seconds'] is None else brief(row['oldest_pending_seconds'])
        cells = ['%-*s' % (width, names[stage]), '%9d' % row['pending'], paint('36', '%9d' % row['running']),
                 '%9d' % row['paused'], paint('31', '%9d' % row['failed']), paint('31', '%9d' % row['timeout']),
                 '%9s' % age, '%9d' % row['workers'], '%9d' % row['processed']]
        if rates:
            cells.append('%8.1f %s' % (rates.get(stage, 0.0), '#' * (bar * row['pending'] // most if bar > 2 else 0)))
        lines.append(' '.join(cells).rstrip())
    if len(stages) < len(seen['stages']):
        lines.append('... and %d more' % (len(seen['stages']) - len(stages)))
    due_s = seen['next_due_seconds']
    lines.append('counted so far: %d passes, %d messages out; next retry %s' % (
        seen['totals']['stages'], seen['totals']['messages'],
        'none' if due_s is None else 'in ' + brief(due_s) if due_s else 'overdue'))
    if any(row['pending'] and row['oldest_pending_seconds'] is None for row in stages.values()):
        lines.append('OLDEST needs track_commit_timestamp = on in postgresql.conf, and a restart of the server')
    return '\n'.join(lines)


def status(config: Config, form: str, watch: bool) -> int:
    """Show what there is to do and who does it; `form`: table, json or prometheus. With `watch` every WATCH_S until
    Ctrl-C. Returns 0 if a dispatcher is running, else 1."""
    colour = sys.stdout.isatty() and not os.environ.get('NO_COLOR')
    rates = Rates(2 * config.stats_interval_s)
    while True:
        try:
            with Session(config, 'status') as session:
                seen = look_at(session, config)
        except Failure as e:
            if not rates.changed or e.code != EXIT_UNAVAILABLE:  # the first look
                raise
            log.error('%s; looking again', e.lines[0])
            time.sleep(WATCH_S)
            continue
        rates.note({stage: row['processed'] for stage, row in seen['stages'].items()}, time.monotonic())
        if form == 'table':
            screen = shutil.get_terminal_size((120, 50))
            text = as_table(seen, rates.values if watch else {}, colour, screen.columns,
                            screen.lines if watch and sys.stdout.isatty() else 0)
            print('\033[H' + text.replace('\n', '\033[K\n') + '\033[J' if watch and sys.stdout.isatty() else text)
        else:
            print(as_json(seen) if form == 'json' else as_prometheus(seen))
        sys.stdout.flush()
        if not watch:
            return EXIT_OK if seen['dispatcher'] else EXIT_NOT_RUNNING
        time.sleep(WATCH_S)


class Rates:
    """Passes a second by stage. The counters are written now and then only: a rate is the growth between two changes,
    and stays until the next one, `patience_s` at most."""

    def __init__(self, patience_s: float) -> None:
        self.values: Dict[str, float] = {}
        self.changed: Dict[str, Tuple[float, int]] = {}  # when a counter last changed, and to what
        self._patience_s = patience_s

    def note(self, counters: Dict[str, int], now: float) -> None:
        """Take a look's counters."""
        for stage, number in counters.items():
            when, before = self.changed.setdefault(stage, (now, number))
            if number != before:
                self.values[stage] = (number - before) / max(now - when, 0.001)
                self.changed[stage] = now, number
            elif now - when > self._patience_s + WATCH_S:
                self.values[stage] = 0.0
            else:
                self.values.setdefault(stage, 0.0)


# check

class Findings:
    """What `check` has found: one line each on standard output, and how bad the worst is."""

    def __init__(self) -> None:
        self.errors = 0

    def note(self, level: str, text: str, *mend: str) -> None:
        """Print a finding; `mend`: SQL that would help, which is not run."""
        self.errors += level == 'error'
        print('%s: %s' % (level, printable(text, 2000)))
        for line in mend:
            print('    %s' % line)

    def ok(self, text: str) -> None:
        """All is well there."""
        self.note('ok', text)


COLUMN_TYPES = {
    'queue': {'ingress_id': ('bigint',), 'stage': ('text', 'character varying'),
              'status': ('text', 'character varying'), 'timeout': ('timestamp with time zone',), 'state': ('jsonb',)},
    'stage_stats': {'stage': ('text', 'character varying'), 'processed': ('bigint',), 'failed': ('bigint',),
                    'timeouts': ('bigint',), 'crashes': ('bigint',), 'processing_seconds': ('double precision',)},
    'dispatch_stats': dict.fromkeys(('stages', 'messages', 'epoch', 'flush'), ('bigint',)),
}  # type: Dict[str, Dict[str, Tuple[str, ...]]]
RIGHTS = (('SELECT', 'queue', ('ingress_id', 'stage', 'status', 'timeout', 'state')),
          ('UPDATE', 'queue', ('status', 'state')),
          *((right, table, tuple(COLUMN_TYPES[table])) for table in ('stage_stats', 'dispatch_stats')
            for right in ('SELECT', 'INSERT', 'UPDATE')))


def check(path: Optional[str], verbose: bool) -> int:
    """Look for what would keep the dispatcher from working; prints findings, changes nothing. Returns the exit code of
    what kept it from looking further, else 1 for errors and 0 for warnings alone."""
    found = Findings()
    try:
        config = load_config(path)
        check_config(found, config, verbose)
        with Session(config, 'check') as session:
            session.conn.autocommit = True
            writable = check_session(found, session, config)
            check_tables(found, session)
            if check_rights(found, session):
                check_queue(found, session, config)
                if writable:
                    check_wake_up(found, session, config)
    except Failure as e:
        for line in e.lines:
            found.note('error', line)
        return e.code
    return EXIT_FOUND if found.errors else EXIT_OK


def check_config(found: Findings, config: Config, verbose: bool) -> None:
    """What the file says, and whether its programs are there."""
    for line in config.warnings:
        found.note('warning', line)
    found.ok('configuration %s: %d stages' % (config.file, len(config.stages)))
    if verbose:
        print_effective(config)
    for stage in config.stages.values():
        problem = program_problem(stage.program[0])
        gone = [word for word in stage.program[1:] if word.startswith('/') and not os.path.exists(native(word))]
        shown = ' '.join(map(shlex.quote, stage.program))
        if problem:
            found.note('error', 'stage %s: PROGRAM %s: %s' % (quoted(stage.name), shown, problem))
        elif gone:
            found.note('warning', 'stage %s: PROGRAM %s: there is no %s' % (quoted(stage.name), shown, gone[0]))
        else:
            found.ok('stage %s: PROGRAM %s' % (quoted(stage.name), shown))


def print_effective(config: Config) -> None:
    """Print every option with its value and where that came from."""
    for section, name, value, source in config.sources:
        print('    [%s] %s = %s  (%s)' % (printable(section), name, printable(value), source))


def program_problem(program: str) -> Optional[str]:
    """Say why a program could not be started, None if nothing speaks against it."""
    program = native(program)  # Python 3.6 in an ASCII locale
    path = program if '/' in program else shutil.which(program)
    if path is None:
        return 'not found on PATH'
    if not os.path.exists(path):
        return 'not found'
    if os.path.isdir(path) or not os.access(path, os.X_OK):
        return 'not an executable file'
    try:
        with open(path, 'rb') as f:
            first = f.readline(200)
    except OSError:  # it may be executed all the same
        return None
    interpreter = first[2:].split()[:1] if first.startswith(b'#!') else []
    if interpreter and not os.access(interpreter[0], os.X_OK):
        return 'its interpreter %s is not an executable file' % interpreter[0].decode('utf-8', 'replace')
    return None


def check_session(found: Findings, session: Session, config: Config) -> bool:
    """The server, and whether a session keeps what it sets. Returns whether it can write."""
    [(version, number, pid, recovering, read_only)] = session.ask(CHECK_SERVER)
    if int(number) < 130000:
        found.note('warning', 'server: PostgreSQL %s; tested are 13 and later' % version)
    else:
        found.ok('server: PostgreSQL %s' % version)
    if recovering or read_only:
        found.note('error', 'server: %s; the dispatcher waits until it can write'
                   % ('in recovery' if recovering else 'the database is read-only'))
    if pid != session.conn.get_backend_pid() and shares_session(config.database, pid):
        found.note('error', 'session: ' + POOLED)
    else:
        found.ok('session: keeps LISTEN and locks')
    session.ask(SETTINGS, names=list(SESSION), values=list(SESSION.values()))
    [(limit, used)] = session.ask(CHECK_CONNECTIONS)
    wanted = sum(stage.parallelism for stage in config.stages.values()) + 1
    text = 'connections: %d wanted (PARALLELISM of all stages + 1), %d of %d free' % (wanted, limit - used, limit)
    if wanted > limit:
        found.note('error', text, 'ALTER SYSTEM SET max_connections = %d;  -- and restart' % (wanted + 20))
    elif wanted > limit - used:
        found.note('warning', text)
    else:
        found.ok(text)
    return not (recovering or read_only)


def check_tables(found: Findings, session: Session) -> None:
    """Tables, columns and types. Raises Failure (EXIT_CONFIG) if something is missing."""
    errors = found.errors
    for table, types in COLUMN_TYPES.items():
        there = dict(session.ask(CHECK_COLUMNS, table=table))
        if not there:
            found.note('error', 'table %s is missing' % table)
            continue
        for name, wanted in types.items():
            if name not in there:
                found.note('error', 'table %s has no column %s' % (table, name),
                           'ALTER TABLE %s ADD COLUMN %s %s;' % (table, name, wanted[0]))
            elif there[name] not in wanted:
                found.note('error', 'column %s.%s is %s, it must be %s' % (table, name, there[name], wanted[0]))
    if found.errors > errors:
        raise Failure(EXIT_CONFIG, 'the tables are missing or unusable: run pepsi-dispatch init, which creates what is '
                                   'missing')
    found.ok('tables: queue, stage_stats and dispatch_stats have what is needed')


def check_rights(found: Findings, session: Session) -> bool:
    """What the role may do, and the one row. Returns whether it makes sense to look further."""
    errors = found.errors
    for right, table, columns in RIGHTS:
        missing = [name for name, in session.ask(CHECK_RIGHTS, right=right, table=table, columns=list(columns))]
        if missing:
            found.note('error', 'rights: no %s on %s (%s)' % (right, table, ', '.join(missing)),
                       'GRANT %s (%s) ON %s TO %s;' % (right, ', '.join(missing), table,
                                                       session.ask('SELECT quote_ident(current_user)')[0][0]))
    if found.errors > errors:
        return False
    found.ok('rights: enough')
    [(rows,)] = session.ask('SELECT count(*) FROM dispatch_stats')
    if rows != 1:
        found.note('error', 'dispatch_stats has %d rows instead of one' % rows,
                   'INSERT INTO dispatch_stats DEFAULT VALUES;' if not rows else 'DELETE FROM dispatch_stats WHERE '
                   'ctid <> (SELECT min(ctid) FROM dispatch_stats);')
    return True


def check_queue(found: Findings, session: Session, config: Config) -> None:
    """The claim's plan, strangers in the queue, and what makes its index slow."""
    keys = session.ask(CHECK_KEY)
    if keys:
        found.ok('queue: ingress_id is unique')
    else:
        found.note('error', 'queue: no unique index on ingress_id', 'ALTER TABLE queue ADD PRIMARY KEY (ingress_id);')
    names = list(config.stages) or ['']
    params = {'stages': array(names), 'caps': array([1] * len(names)), 'floors': array([FIRST_ID] * len(names)),
              'held': '{}'}
    plan = '\n'.join(line for line, in session.ask('EXPLAIN ' + CLAIM, **params))
    used = re.search(r'Index (?:Only )?Scan using (\S+) on queue q', plan)
    if not used or not session.ask(CHECK_PENDING, index=used.group(1)):
        found.note('error', 'claim: its plan does not use a partial index on (stage, ingress_id)',
                   "CREATE INDEX CONCURRENTLY queue_pending ON queue (stage, ingress_id) WHERE status = 'pending';")
    else:
        found.ok('claim: its plan uses the partial index')
        strangers = [stage for stage, in session.ask(STRANGERS, stages=array(config.stages))]
        if strangers:
            found.note('warning', 'queue: rows are pending at %s' % without_section(strangers))
    for name, index in (('paused', 'queue_paused ON queue (timeout)'),
                        ('RUNNING', 'queue_unfinished ON queue (upper(status), stage)')):
        if not session.ask(CHECK_PARTIAL, status='%' + name + '%'):
            where = "status = 'paused'" if name == 'paused' else "upper(status) IN ('RUNNING', 'FAILED', 'TIMEOUT')"
            found.note('warning', 'queue: no partial index finds the %s rows: looking for them reads the whole table'
                       % name.lower(), 'CREATE INDEX CONCURRENTLY %s WHERE %s;' % (index, where))
    for pid, who, seconds in session.ask(CHECK_OLD, limit=OLD_TRANSACTION_S):
        found.note('warning', 'vacuum: held back by a transaction of server process %d (%s), open for %s; claims slow '
                   'down until it ends' % (pid, who, brief(seconds)), 'SELECT pg_terminate_backend(%d);' % pid)
    for dead, live in session.ask(CHECK_DEAD):
        if dead > 100000 and dead > live:
            found.note('warning', 'vacuum: queue has %d dead rows beside %d living ones' % (dead, live),
                       'VACUUM (ANALYZE) queue;')


def check_wake_up(found: Findings, session: Session, config: Config) -> None:
    """Does an INSERT notify? Tried with one that inserts no row, and wakes a running dispatcher once."""
    hint = ('queue: an INSERT sends no notification: unless whoever inserts sends NOTIFY ingress, messages wait for '
            'the heartbeat (POLL_INTERVAL %s)' % brief(config.poll_interval_s))
    silent = 'SELECT NOT pg_try_advisory_xact_lock_shared(%d)' % HUSH_KEY
    try:
        session.ask(LISTEN)
        hushed = session.ask(silent)[0][0]
        session.ask('INSERT INTO queue (stage) SELECT NULL WHERE false')
    except psycopg2.ProgrammingError as e:
        if session.ask(CHECK_TRIGGER):
            found.ok('queue: a trigger notifies on INSERT (not tried: %s)' % complaint(e))
        else:
            found.note('warning', hint, '-- pepsi-dispatch init --print shows the trigger')
        return
    deadline = time.monotonic() + 2
    while not session.conn.notifies and time.monotonic() < deadline:
        with selectors.DefaultSelector() as selector:
            selector.register(session.conn.fileno(), selectors.EVENT_READ)
            selector.select(0.1)
        session.conn.poll()
    if session.conn.notifies:
        found.ok('queue: an INSERT sends a notification, and it arrives')
    elif (hushed or session.ask(silent)[0][0]) and session.ask(CHECK_TRIGGER):
        found.ok('queue: messages come so thick that the dispatcher looks by itself, without notifications')
    else:
        found.note('warning', hint, '-- pepsi-dispatch init --print shows the trigger')


# -- main --------------------------------------------------------------------------------------------------------------

class LogHandler(logging.Handler):
    """Writes one event a line to standard error and never waits for its reader: what does not fit now is dropped,
    counted, and reported when there is room again.

    Standard error is shared with the workers, so its blocking mode is not ours to change. A pipe is opened a second
    time, non-blocking; where that is refused, poll() tells whether PIPE_BUF bytes fit.
    """

    LIMIT = 4096  # PIPE_BUF: a line up to this goes into a pipe whole or not at all

    def __init__(self, fd: int = 2, as_json: bool = False) -> None:
        super().__init__()
        self._fd = fd
        self._json = as_json
        self._dropped = 0
        self._stamp = not os.isatty(fd)
        self._poll: Any = None
        try:
            status = os.fstat(fd)
            if os.environ.get('JOURNAL_STREAM') == '%d:%d' % (status.st_dev, status.st_ino):  # it has its own
                self._stamp = False
            if stat.S_ISFIFO(status.st_mode):
                self._fd = os.open('/proc/self/fd/%d' % fd, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            pass
        if self._fd == fd:
            self._poll = selectors.PollSelector() if hasattr(selectors, 'PollSelector') else None
            if self._poll:
                try:
                    self._poll.register(fd, selectors.EVENT_WRITE)
                except (OSError, ValueError):
                    self._poll = None

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record.created)) + '.%03d' % record.msecs
        if not self._json:
            return '%s%-7s %s' % (stamp + ' ' if self._stamp else '', record.levelname, record.getMessage())
        fields = {'time': stamp, 'level': record.levelname.lower(), 'pid': record.process,
                  'message': record.getMessage()}
        line = json.dumps(fields, sort_keys=True)
        if len(line) >= self.LIMIT:  # a character may become twelve, and none must be cut
            line = json.dumps(dict(fields, message=record.getMessage()[:self.LIMIT // 13]), sort_keys=True)
        return line

    def _write(self, record: logging.LogRecord) -> None:
        """Write one line, or raise OSError. Cuts what is too long between two characters."""
        data = self.format(record).encode('utf-8', 'backslashreplace')
        if len(data) >= self.LIMIT:
            data = data[:self.LIMIT - 1].decode('utf-8', 'ignore').encode('utf-8')
        if self._poll and not self._poll.select(0):
            raise BlockingIOError(errno.EAGAIN, 'full')
        os.write(self._fd, data + b'\n')

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                self._write(logging.LogRecord(log.name, logging.WARNING, '', 0, 'dropped %d log lines: standard error '
                                              'did not take them', (self._dropped,), None))
                self._dropped = 0
            self._write(record)
        except OSError:
            self._dropped += 1
        except Exception:  # a log line must not end the program
            self.handleError(record)
        if record.exc_info:
            for line in logging.Formatter().formatException(record.exc_info).splitlines():
                self.emit(logging.LogRecord(record.name, record.levelno, '', 0, '%s', (printable(line, 1000),), None))


def set_up_log(arguments: Dict[str, Any]) -> None:
    """Send the log to standard error, as the options say."""
    handler = LogHandler(2, bool(arguments['--log-json']))
    level = logging.WARNING if arguments['-q'] else (logging.INFO, logging.DEBUG, TRACE)[min(arguments['-v'], 2)]
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False


def set_up_standard_streams() -> None:
    """Open what is closed of 0, 1 and 2: else a pipe of ours would take its place, and the log would go there. Write
    UTF-8 whatever the locale says."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)
    sys.stdin = sys.stdin or open(0, closefd=False)
    sys.stdout = open(1, 'w', encoding='utf-8', errors='backslashreplace', closefd=False,
                      buffering=1 if os.isatty(1) else -1)
    sys.stderr = sys.stderr or open(2, 'w', closefd=False)


def dispatch_command(arguments: Dict[str, Any]) -> int:
    """Do what the command line says. Raises Failure."""
    if arguments['sample']:
        return sample()
    if arguments['init'] and arguments['--print']:
        print(SCHEMA + GRANTS, end='')
        return EXIT_OK
    if arguments['check']:
        return check(arguments['-c'], bool(arguments['-v']))
    ids = read_ids(arguments['ID'])
    try:  # Python 3.6 in an ASCII locale knows no better
        stage = arguments['--stage'] and os.fsencode(arguments['--stage']).decode('utf-8')
    except UnicodeDecodeError:
        raise Failure(EXIT_USAGE, '--stage: not UTF-8 text') from None
    config = load_config(arguments['-c'])
    for line in config.warnings:
        log.warning('%s', line)
    if arguments['init']:
        return init(config)
    if arguments['status']:
        form = 'json' if arguments['--json'] else 'prometheus' if arguments['--prometheus'] else 'table'
        return status(config, form, arguments['--watch'])
    if arguments['requeue']:
        return requeue(config, ids if arguments['ID'] else None, stage, arguments['--dry-run'])
    return run(config, not arguments['--no-wait'])


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command line and return the exit code; `argv` without the program's name, default sys.argv[1:]."""
    set_up_standard_streams()
    try:
        arguments = docopt(__doc__, argv=None if argv is None else list(argv), version='pepsi-dispatch ' + __version__)
    except DocoptExit as e:
        words = ' '.join(map(printable, sys.argv[1:] if argv is None else argv))
        print('pepsi-dispatch: cannot make sense of: %s\n%s' % (words, e.usage.strip()), file=sys.stderr)
        return EXIT_USAGE
    set_up_log(arguments)
    try:
        return dispatch_command(arguments)
    except Failure as e:
        for line in e.lines:
            log.error('%s', line)
        return e.code
    except KeyboardInterrupt:
        return EXIT_OK
    except BrokenPipeError:  # `status --watch | head`: nobody reads any more, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
        return EXIT_OK
    except Exception:
        log.exception('internal error, please report it; a restart recovers')
        return EXIT_INTERNAL


if __name__ == '__main__':
    sys.exit(main())
