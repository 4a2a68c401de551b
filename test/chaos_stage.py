#!/usr/bin/env python3
"""The stage program of the chaos and sweep tests: worker_stub's stub, with proofs of what it did.

PROGRAM = chaos_stage.py --log=FILE --locks=FILE [--database=DSN] [--start=STEPS] [--end=STEPS] [STEP...]

Each pass holds a lock on the byte at the message's id of the file --locks, which the kernel gives back when the process
dies: who does not get it is the second to execute this message at this time, and writes 'double' to the log. Each pass
inserts a row into the table effect, in the transaction of its decision. Steps in the message's state that are a list
are taken by the number of passes that were committed at this stage before.
"""
import fcntl
import os
import shlex
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from worker_stub import Stub


class Stage(Stub):
    """The stub, and what is said above."""

    def __init__(self, arguments):
        own = {}
        for argument in arguments:
            name, _, value = argument.partition('=')
            if name in ('--locks', '--database'):
                own[name] = value
        super().__init__([argument for argument in arguments if argument.partition('=')[0] not in own])
        self.locks = os.open(own['--locks'], os.O_RDWR | os.O_CREAT, 0o666)
        self.worker.database = own.get('--database', self.worker.database)

    def handle(self, message):
        try:
            fcntl.lockf(self.locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, message.id)
        except OSError:
            self.log(message, 'double')
        try:
            super().handle(message)
        finally:
            fcntl.lockf(self.locks, fcntl.LOCK_UN, 1, message.id)

    def find_steps(self, message):
        with message.cursor() as cursor:
            cursor.execute('INSERT INTO effect (id, stage, pid) VALUES (%s, %s, %s)',
                           [message.id, self.worker.stage, os.getpid()])
        found = message.state.get('stub')
        if isinstance(found, dict):
            found = found.get(self.worker.stage)
        if isinstance(found, list):
            with message.cursor() as cursor:
                cursor.execute('SELECT count(*) - 1 FROM effect WHERE id = %s AND stage = %s',
                               [message.id, self.worker.stage])
                found = found[min(cursor.fetchone()[0], len(found) - 1)]
        return shlex.split(found) if found else self.steps

    def do_later(self, message, value):
        """later=STAGE:SECONDS: pause, then go on at another stage."""
        stage, _, seconds = value.rpartition(':')
        message.pause(float(seconds), stage)


if __name__ == '__main__':
    Stage(sys.argv[1:-3]).run()
