#!/usr/bin/env python3
"""The reference stage worker of pepsi-dispatch: a library for stages in Python, and a stage for tests and trials.

As a library, a stage is a function and one call:

    from worker_stub import serve

    def handle(message):
        message.cursor().execute('INSERT INTO thumbnail (message) VALUES (%s)', [message.id])
        message.advance('deliver')

    serve(handle)

As a program it is a stage that does what PROGRAM in its section of pepsi.conf, or the message itself, tells it to:
see Stub, or 'worker_stub.py --help'. It needs psycopg2 and nothing else; copy this one file where it is wanted.
"""
# To write a worker in another language, do what Worker does, in this order:
#
#   1. Keep descriptors 0 and 1 to yourself. Whatever else prints or reads goes to standard error and /dev/null.
#   2. Connect to the database before the first byte is read from standard input. The dispatcher sees in the pipe
#      what was not read: a worker that dies before it reads has not begun, so no message is blamed for its death.
#   3. Read one id, a decimal number and a newline. An end of file, also one within a line, ends the worker: exit 0.
#   4. Do the work and write the decision to the row in one transaction, guarded: only where the row is still running
#      at this stage. Where it is not, somebody cancelled or moved it meanwhile, and it is not ours to write.
#   5. Commit, durably: then, and not before, write one line, in one write: '0 id=ID'. If the message cannot be
#      processed, roll back and write 'N id=ID reason', N from 1 to 255: the dispatcher marks the row failed.
#   6. Go on with 3. Answers are in the order of the ids, one each.
#
# Whoever reads more than one line at a time works as well, but then the dispatcher can no longer tell that the oldest
# of these ids was not begun, and blames it when the worker dies. Never are two ids blamed for one death.
import configparser
import contextlib
import io
import json
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

import psycopg2

TEXT_MAX = 1000  # characters of a reason that the dispatcher keeps
PATIENCE_S = 10.0  # for a database that went away while the worker lived: covers a restart of the server

READ = """
SELECT COALESCE(state, '{}')::text
  FROM queue
 WHERE ingress_id = %(id)s
   AND stage = %(stage)s
   AND status = 'running'
"""

# The one write to the row. Its guard makes it harmless when the row was cancelled, moved or deleted meanwhile. A pause
# counts from now, by the database's clock, not from the start of the transaction.
DECIDE = """
UPDATE queue
   SET stage = %(to)s,
       status = %(status)s,
       timeout = CASE WHEN %(status)s <> 'paused' THEN timeout
                      WHEN %(pause_s)s::float8 = 'infinity' THEN 'infinity'
                      ELSE clock_timestamp() + %(pause_s)s::float8 * interval '1 second' END,
       state = CASE WHEN %(state)s::jsonb IS NULL THEN state
                    ELSE COALESCE(state, '{}') || %(state)s::jsonb END
 WHERE ingress_id = %(id)s
   AND stage = %(stage)s
   AND status = 'running'
"""


class Gone(Exception):
    """The row is no longer running at this stage: nothing is left to do, and whatever was done is rolled back."""


class Leave(SystemExit):
    """SIGTERM came while nothing was being done."""


class Message:
    """One pass of one message through this stage; what handle() gets.

    The last decision counts: done(), advance(), pause() or fail(); none at all means done(). It is written, together
    with what was done through cursor(), when handle() returns.
    """

    def __init__(self, ingress_id, stage, connection):
        self.id = ingress_id
        self.stage = stage
        self.connection = connection  # psycopg2's, within the transaction of this pass; do not close it
        self._fused = ''
        self._failure = None  # or (status, text)
        self._state = None  # until it is read
        self._decision = {}
        self._written = False
        self.done()

    def cursor(self):
        """Return a new psycopg2 cursor in the transaction of this pass."""
        return self.connection.cursor()

    @property
    def state(self):
        """The state of the row as a dict, read at the first use; to change it, give new keys to the decision.

        Raises Gone if the row is no longer running at this stage, ValueError if its state is no JSON object.
        """
        if self._state is None:
            self._state = self._read()
        return self._state

    def fetch(self):
        """Return the state of the row as JSON text; raise Gone if the row is no longer running at this stage."""
        with self.cursor() as cursor:
            cursor.execute(READ, {'id': self.id, 'stage': self.stage})
            row = cursor.fetchone()
        if row is None:
            raise Gone
        return row[0]

    def done(self, state=None, status='done'):
        """Let the message leave the pipeline; status: a final one.

        state, here and below: a dict whose keys are merged into the state of the row, replacing those of that name.
        """
        self._decide(self.stage, status, state=state)

    def advance(self, stage, state=None):
        """Send the message to another stage; ValueError if it is this one, where pause(0) does what is meant."""
        if stage == self.stage:
            raise ValueError('message %d cannot advance to the stage where it is: pause it' % self.id)
        self._decide(stage, 'running', state=state)

    def pause(self, seconds=None, stage=None, state=None):
        """Put the message aside for so many seconds; then it is pending again, at another stage if one is given.

        None or infinity: until somebody sets it pending.
        """
        if seconds is not None and math.isnan(seconds):
            raise ValueError('a pause of nan seconds')
        self._decide(stage or self.stage, 'paused', pause_s=seconds, state=state)

    def fail(self, reason='', status=1):
        """Roll back what was done in this pass and let the dispatcher mark the message failed, for this reason.

        status: from 1 to 255, else ValueError; for the dispatcher they are all alike.
        """
        if not 1 <= status <= 255:
            raise ValueError('status %r is not from 1 to 255' % status)
        self._failure = status, str(reason)

    def fused(self, stage, seconds):
        """Report that the work of another stage was done in this pass too, and how long that took.

        ValueError if seconds are negative or not finite, or if the protocol cannot carry the name of the stage.
        """
        if not 0 <= seconds < float('inf'):
            raise ValueError('stage %s took %r seconds' % (stage, seconds))
        if stage == 'id' or '=' in stage or not stage.isprintable() or stage.split() != [stage]:
            raise ValueError('stage %r cannot be reported: its name is id, or has a blank or = in it' % stage)
        self._fused += ' %s=%r' % (stage, round(float(seconds), 6))

    def commit(self):
        """Write the decision and commit it, unless that was done or the pass failed; tell whether it wrote.

        serve() calls this when handle() returns. Called earlier, what follows is committed too, but decides no more.
        Raises Gone if the row is no longer running at this stage.
        """
        if self._failure:
            return False
        writes = not self._written
        if writes:
            if self._decision['state'] is not None:
                self._read()  # for its ValueError: in SQL, array || object appends to the array
            self._write()
        self.connection.commit()
        return writes

    def answer(self):
        """Return the line for the dispatcher, as bytes."""
        status, text = self._failure or (0, '')
        text = ' '.join(text.split())[:TEXT_MAX]
        if '=' in text.partition(' ')[0]:
            text = 'reason: ' + text  # else its first word would be taken for a fused stage
        text = ''.join(char if char.isprintable() else '?' for char in text)
        return ('%d id=%d%s %s' % (status, self.id, self._fused, text)).rstrip().encode() + b'\n'

    def _write(self):
        # Where nothing precedes it, it needs no BEGIN and no COMMIT: one round trip instead of three.
        alone = self.connection.status == psycopg2.extensions.STATUS_READY
        if alone:
            self.connection.autocommit = True
        try:
            with self.cursor() as cursor:
                cursor.execute(DECIDE, self._decision)
                if cursor.rowcount != 1:
                    raise Gone
            self._written = True
        finally:
            if alone:
                self.connection.autocommit = False

    def _read(self):
        state = json.loads(self.fetch())
        if not isinstance(state, dict):
            raise ValueError('state of message %d is no JSON object' % self.id)
        return state

    def _decide(self, to, status, pause_s=None, state=None):
        self._failure = None
        self._decision = {'id': self.id, 'stage': self.stage, 'to': to, 'status': status, 'pause_s': pause_s,
                          'state': None if state is None else json.dumps(dict(state), allow_nan=False)}


class Worker:
    """The process: its ends of the protocol, its database connection, and the function that does the work."""

    def __init__(self, handle, argv=None):
        """Read the configuration and take the protocol away from descriptors 0 and 1; does not connect yet.

        argv: 'PROGRAM [ARGUMENT...] worker -c CONFIG_FILE', default: sys.argv. Raises SystemExit with one line that
        says what is wrong.
        """
        argv = sys.argv if argv is None else argv
        if argv[-3:-1] != ['worker', '-c']:
            raise SystemExit('usage: %s [ARGUMENT...] worker -c CONFIG_FILE' % argv[0])
        if b'PEPSI_STAGE' not in os.environb:
            raise SystemExit('PEPSI_STAGE is not set: pepsi-dispatch sets it to the name of the stage')
        self.handle = handle
        self.stage = os.environb[b'PEPSI_STAGE'].decode()  # UTF-8, whatever the locale is
        self.database = read_database(argv[-1])
        os.environ.setdefault('PGCONNECT_TIMEOUT', '10')  # seconds, not for ever; what DATABASE says goes first
        self.connection: Any = None  # psycopg2's, from connect() on
        self.leaving = False  # SIGTERM came
        self.waiting = False  # for an id: nothing is lost by leaving at once
        # dup() makes them close-on-exec: no child can hold the protocol open, print into it or eat ids.
        # Note: unbuffered, so that readline() takes the bytes of one line and leaves the rest in the pipe.
        self.ids = io.FileIO(os.dup(0), closefd=False)
        self.answers = os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        sys.stdout = sys.stderr  # one buffer: what is printed keeps its order
        signal.signal(signal.SIGTERM, self._terminate)

    def run(self):
        """Work until standard input ends or SIGTERM comes; return then.

        A message at work is finished first: the dispatcher still takes its answer, so that nothing is done twice. If
        it takes longer than the dispatcher's grace, the dispatcher kills this process and starts the message anew.
        Raises SystemExit if the database cannot be reached; what was not begun stays in the pipe.
        """
        if self.connection is None:
            self.connect(0)  # no patience: the dispatcher knows how long to hold off a stage that cannot start
        with contextlib.suppress(Leave):
            while self.wait():
                if not self.connected():
                    self.connect(PATIENCE_S)  # before the id is read: if this fails, the message was not begun
                line = self.ids.readline(32)
                if not line.endswith(b'\n'):
                    break  # Note: '12' may be what is left of '123' where the dispatcher died
                if not re.match(rb'-?[0-9]+\n', line):
                    raise SystemExit('not an id: %r' % line)
                self.send(self.work(int(line)))

    def wait(self):
        """Wait for standard input; False if it has ended, or if it is time to leave. Raises Leave on SIGTERM."""
        poll = select.poll()
        poll.register(self.ids, select.POLLIN)
        self.waiting = True  # before the look at leaving: a signal between the two must not be lost
        try:
            return not self.leaving and bool(poll.poll()[0][1] & select.POLLIN)
        finally:
            self.waiting = False

    def work(self, ingress_id):
        """Process one message; return the answer.

        When the connection is lost on the way, nobody knows whether the last commit took place: on a new one the row
        tells, and if it is still running here, the pass is made again. Once: then this process ends without an answer,
        and the dispatcher judges: it blames no message for what happens while it has no database either.
        """
        lost = None
        for _ in range(2):
            message = Message(ingress_id, self.stage, self.connection)
            try:
                if lost:
                    message.fetch()
                self.handle(message)
                message.commit()
                self.rollback()  # of one that failed
                return message.answer()
            except Gone:
                self.rollback()
                note('message %d is no longer running at this stage' % ingress_id)
                return (lost or message).answer()
            except Exception as error:
                note(traceback.format_exc().rstrip())
                if self.rollback():
                    message.fail(describe(error))
                    return message.answer()
            lost = message
            self.connect(PATIENCE_S)
        raise SystemExit('lost the database twice at message %d' % ingress_id)

    def send(self, line):
        """Write bytes to the dispatcher; at once, unless the pipe is full."""
        try:
            while line:
                line = line[os.write(self.answers, line):]
        except BrokenPipeError:
            raise SystemExit('nobody reads the answer: the dispatcher is gone') from None

    def connect(self, patience_s):
        """Connect to the database, trying again for so many seconds; raise SystemExit if that fails."""
        deadline = time.monotonic() + patience_s
        delay_s = 0.1
        while True:
            try:
                self.connection = psycopg2.connect(self.database, client_encoding='utf8')
                return
            except psycopg2.ProgrammingError:  # its text may quote the password
                raise SystemExit('DATABASE is no connection string of libpq') from None
            except psycopg2.OperationalError as error:
                if self.leaving or time.monotonic() + delay_s > deadline:
                    raise SystemExit('cannot connect to the database: %s' % str(error).strip()) from None
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, 1.0)

    def connected(self):
        """Tell whether the connection is alive, as far as this host knows; asks the server only if that is in doubt."""
        if self.connection.closed:
            return False
        if not select.select([self.connection], [], [], 0)[0]:
            return True
        try:  # something came that nobody asked for: the end of the connection, or a notice
            with self.connection.cursor() as cursor:
                cursor.execute('SELECT 1')
            return self.rollback()
        except psycopg2.Error:
            return False

    def rollback(self):
        """Roll back what is open; False if the connection is lost."""
        try:
            self.connection.rollback()
        except psycopg2.Error:
            return False
        return not self.connection.closed

    def _terminate(self, number, frame):
        self.leaving = True
        if self.waiting:
            raise Leave


def serve(handle, argv=None):
    """Be the worker of a stage: call handle(message) for each id that the dispatcher hands over; see Worker.run().

    An exception in handle is rolled back and fails that message only. Call it early and from the main thread: what is
    printed before this call goes to the dispatcher and is a violation of the protocol.
    """
    Worker(handle, argv).run()


def read_database(path):
    """Return DATABASE of section [pepsi] in a configuration file, '' if it has none; SystemExit if it is unreadable."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with open(path, encoding='utf-8-sig') as file:
            parser.read_file(file)
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise SystemExit('cannot read %s: %s' % (path, type(error).__name__)) from None
    return parser.get('pepsi', 'DATABASE', fallback='')


def describe(error):
    """Return the name and the text of an exception, for the reason of a failure."""
    try:
        text = str(error)
    except Exception:
        text = '(it cannot be shown)'
    if isinstance(error, psycopg2.Error):
        text = text.partition('\n')[0]  # what follows may quote the row, and content is nothing for a log
    return '%s: %s' % (type(error).__name__, text) if text else type(error).__name__


def note(text):
    """Write to the log, which is standard error; a log that nobody reads is no reason to fail."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Stub:
    """A stage that does as it is told, step by step: for tests and trials.

    PROGRAM = worker_stub.py [--log=FILE] [--start=STEPS] [--end=STEPS] [--blind] [STEP...]

    The steps behind the options are done for each message, unless its state has steps of its own below the key stub,
    for all stages or by the name of the stage; a list has one element for each attempt, and the last one stays:

        {"stub": "sleep=0.5 done"}
        {"stub": {"resize": ["crash", "crash=9", ""], "deliver": "pause=infinity"}}

    An empty element is for the steps of PROGRAM. Steps are split like a shell would. They are the do_ methods below,
    with '=' and a value where one is named; what takes no decision ends in done.

    --log    append one JSON array per event: [monotonic seconds, pid, stage, id, 'begin', 'commit' or 'end']; 'end' is
             before the answer, and missing if the process dies: then the pass ended with it
    --start  steps for the time before the database is connected and anything is read
    --end    steps for the time after the end of standard input: hang to ignore it
    --blind  do not look at the state, which saves a statement for each message
    """

    def __init__(self, arguments):
        self.options = {'log': '', 'start': '', 'end': '', 'blind': ''}
        self.steps = []
        for argument in arguments:
            name, _, value = argument.partition('=')
            if argument.startswith('--') and name[2:] in self.options:
                self.options[name[2:]] = value or 'yes'
            else:
                self.steps.append(argument)
        for step in self.steps + shlex.split(self.options['start'] + ' ' + self.options['end']):
            if not hasattr(self, 'do_' + step.partition('=')[0]):
                raise SystemExit('unknown step or option: %s' % step)
        self.worker = Worker(self.handle)

    def run(self):
        """Work until the end of standard input, or as the steps say."""
        self.follow(None, shlex.split(self.options['start']))
        while True:
            try:
                self.worker.run()
                break
            except Silence:
                self.worker.rollback()
        self.follow(None, shlex.split(self.options['end']))

    def handle(self, message):
        """Do the steps for a message."""
        self.log(message, 'begin')
        try:
            self.follow(message, self.steps if self.options['blind'] else self.find_steps(message))
            self.do_commit(message)
        finally:
            self.log(message, 'end')

    def find_steps(self, message):
        """Return the steps for this message; uses up one element of a list, for good, before the attempt begins."""
        path, found = ['stub'], message.state.get('stub')
        if isinstance(found, dict):
            path, found = path + [self.worker.stage], found.get(self.worker.stage)
        if isinstance(found, list):
            if len(found) > 1:
                self._change(message, 'UPDATE queue SET state = state #- %s::text[]', path + ['0'])
            found = found[0] if found else ''
        return shlex.split(found) if found else self.steps

    def follow(self, message, steps):
        """Do steps; message is None before the first and after the last one."""
        for step in steps:
            name, _, value = step.partition('=')
            do = getattr(self, 'do_' + name, None)
            if do is None:
                raise ValueError('unknown step %s' % step)
            if do(message, value) is False:
                break

    def log(self, message, event):
        """Append an event to the execution log: one write, which O_APPEND keeps in one piece."""
        if self.options['log']:
            line = json.dumps([time.monotonic(), os.getpid(), self.worker.stage, message.id, event]) + '\n'
            log = os.open(self.options['log'], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.write(log, line.encode())
            os.close(log)

    def do_done(self, message, status):
        """done[=STATUS]: a status of the row other than done may be final, or pending, or anything."""
        message.done(status=status or 'done')

    def do_advance(self, message, stage):
        """advance=STAGE"""
        message.advance(stage)

    def do_pause(self, message, seconds):
        """pause[=SECONDS]: infinity is a number of seconds; none stands for NULL."""
        message.pause(float(seconds) if seconds else None)

    def do_merge(self, message, state):
        """merge=JSON: done, with new keys for the state."""
        message.done(state=json.loads(state))

    def do_fail(self, message, value):
        """fail[=[STATUS] TEXT]"""
        status, _, text = value.partition(' ')
        if status.isdigit():
            message.fail(text, int(status))
        else:
            message.fail(value)

    def do_raise(self, message, text):
        """raise[=TEXT]: an exception in the stage."""
        raise RuntimeError(text)

    def do_fused(self, message, value):
        """fused=STAGE:SECONDS"""
        stage, _, seconds = value.rpartition(':')
        message.fused(stage, float(seconds))

    def do_commit(self, message, value=''):
        """commit: now; what follows is between the commit and the answer."""
        if message.commit():
            self.log(message, 'commit')

    def do_delete(self, message, value):
        """delete: the message's own row, and commit."""
        self._change(message, 'DELETE FROM queue')

    def do_unfinished(self, message, value):
        """unfinished: report success, but leave the row as it is."""
        self.do_say(message, '0 id={id}')
        self.do_silent(message, '')

    def do_silent(self, message, value):
        """silent: write nothing to the row, do not answer, go on with the next message."""
        raise Silence

    def do_say(self, message, text):
        """say=TEXT: a line of its own for the dispatcher; {id} is the id, %XX is a byte."""
        self.do_mumble(message, text + '%0A')

    def do_mumble(self, message, text):
        """mumble=TEXT: the same without an end of line."""
        text = text.replace('{id}', str(message.id) if message else '0')
        self.worker.send(unquote(text))

    def do_flood(self, message, size):
        """flood=BYTES: a long line for the dispatcher."""
        self.worker.send(b'x' * int(size) + b'\n')

    def do_print(self, message, text):
        """print=TEXT: what a careless stage, its C library and its children print."""
        print(text)
        os.write(1, text.encode() + b'\n')
        subprocess.call(['echo', text])

    def do_sleep(self, message, seconds):
        """sleep=SECONDS"""
        time.sleep(float(seconds))

    def do_hang(self, message=None, value=''):
        """hang: for ever; like all steps it is finished first when SIGTERM comes, so it never ends."""
        while True:
            signal.pause()

    def do_sigterm(self, message, value):
        """sigterm=ignore or sigterm=default: die of it at once."""
        signal.signal(signal.SIGTERM, {'ignore': signal.SIG_IGN, 'default': signal.SIG_DFL}[value])

    def do_stop(self, message, value):
        """stop: itself, until somebody lets it go on."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_crash(self, message, value):
        """crash[=CODE or =SIGNAL]: exit at once with a code, default 1, or by a signal such as KILL or SEGV."""
        if not value or value.isdigit():
            os._exit(int(value or 1))
        number = getattr(signal, 'SIG' + value)
        with contextlib.suppress(OSError):  # KILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        self.do_hang()

    def do_close(self, message, value):
        """close: standard output, and live on."""
        os.close(self.worker.answers)
        self.do_hang()

    def do_child(self, message, seconds):
        """child=SECONDS: start a process that holds standard output open for so long."""
        self._spawn(seconds, False)

    def do_escape(self, message, seconds):
        """escape=SECONDS: the same in a session of its own, which no signal to the group reaches."""
        self._spawn(seconds, True)

    def do_wait(self, message, value):
        """wait: until there is something to read, and leave it there."""
        return self.worker.wait()

    def do_gulp(self, message, value):
        """gulp: read all that is waiting, and forget it."""
        self.worker.ids.read(65536)

    def do_await(self, message, path):
        """await=FILE: wait until it exists."""
        while not os.path.exists(path):
            time.sleep(0.005)

    def do_touch(self, message, path):
        """touch=FILE: create it."""
        open(path, 'a').close()

    def do_if(self, message, path):
        """if=FILE: do what follows only if it exists."""
        return os.path.exists(path)

    def do_unless(self, message, path):
        """unless=FILE: do what follows only if it does not exist."""
        return not os.path.exists(path)

    def _change(self, message, statement, *values):
        """Write to the row besides the decision, and commit."""
        with message.cursor() as cursor:
            cursor.execute(statement + " WHERE ingress_id = %s AND stage = %s AND status = 'running'",
                           values + (message.id, self.worker.stage))
            if cursor.rowcount != 1:
                raise Gone
        message.connection.commit()

    def _spawn(self, seconds, own_session):
        child = subprocess.Popen(['sleep', seconds], stdout=self.worker.answers, start_new_session=own_session)
        child.returncode = 0  # Note: nobody waits for it; Popen would complain about that when it is forgotten


class Silence(BaseException):
    """A step asked for no answer: no Exception, which would be one."""


def unquote(text):
    """Return text as bytes, with %XX standing for the byte of that number."""
    first, *rest = text.encode().split(b'%')
    return first + b''.join(bytes([int(part[:2], 16)]) + part[2:] for part in rest)


def main():
    """Be the stub."""
    if sys.argv[1:2] in (['-h'], ['--help']):
        print(Stub.__doc__)
        for name in dir(Stub):
            if name.startswith('do_'):
                print('   ', getattr(Stub, name).__doc__)
        return
    Stub([os.fsencode(argument).decode() for argument in sys.argv[1:-3]]).run()  # UTF-8, whatever the locale is


if __name__ == '__main__':
    main()
