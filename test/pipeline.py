"""A small PEPSI system for end-to-end tests: the tables, a configuration, stages that do as they are told."""
import collections
import functools
import json
import os
import re
import sys

import worker_stub
from support import Running, call, wait_until, write_config

STUB = os.path.abspath(worker_stub.__file__)

Row = collections.namedtuple('Row', 'stage status timeout state')
Counts = collections.namedtuple('Counts', 'processed failed timeouts crashes')


@functools.lru_cache(maxsize=None)
def get_schema():
    """Return what `pepsi-dispatch init` executes; asked once, each start of a program takes its time."""
    result = call('init', '--print')
    assert result.code == 0, result.err
    return result.out


class Pipeline:
    """A database with the tables in it, a directory for the configuration, and short ways to use both."""

    def __init__(self, directory, dsn, db, schema=None):
        """Create the tables. directory: for the files; db: a connection in autocommit, to dsn.

        schema: SQL that makes the table queue before init makes what is missing.
        """
        self.directory = str(directory)
        self.dsn = dsn
        self.db = db
        self.log = os.path.join(self.directory, 'execution.log')
        if schema:
            self.execute(schema)
        self.execute(get_schema())

    # configuration

    def stub(self, *steps):
        """Return a PROGRAM: worker_stub.py with these steps and options, and the execution log."""
        return [sys.executable, STUB, '--log=' + self.log] + list(steps)

    def script(self, name, text):
        """Write a program in POSIX shell and return its path. It gets the ids on standard input, like any worker."""
        path = os.path.join(self.directory, name)
        with open(path, 'w', encoding='utf-8') as file:
            file.write('#!/bin/sh\n' + text)
        os.chmod(path, 0o755)
        return path

    def python(self, name, text):
        """Write a program in Python, with the path of the execution log as its only argument; return its PROGRAM."""
        path = os.path.join(self.directory, name)
        with open(path, 'w', encoding='utf-8') as file:
            file.write(text)
        return [sys.executable, '-S', path, self.log]

    def write_config(self, stages, **options):
        """Write pepsi.conf and return its path. A heartbeat of an hour unless options say otherwise: nothing may
        depend on it."""
        return write_config(self.directory, self.dsn, stages, **dict({'poll_interval': '1 h'}, **options))

    def run(self, stages, *arguments, env=None, cwd=None, **options):
        """Return a Running for these stages; see write_config()."""
        return Running(self.write_config(stages, **options), *arguments, env=env, cwd=cwd)

    # the tables

    def execute(self, statement, *parameters):
        """Run one statement; return its rows, and None if it is of a kind that has none."""
        with self.db.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else None

    def insert(self, stage, number=1, stub=None):
        """Queue messages with one statement and return their ids, ascending. stub: the stub's steps for them."""
        state = json.dumps({} if stub is None else {'stub': stub})
        return sorted(id for id, in self.execute(
            'INSERT INTO queue (stage, state) SELECT %s, %s FROM generate_series(1, %s) RETURNING ingress_id',
            stage, state, number))

    def insert_one(self, stage, stub=None):
        """Queue one message and return its id."""
        return self.insert(stage, 1, stub)[0]

    def row(self, id):
        """Return the Row of a message, None if it is gone."""
        rows = self.execute('SELECT stage, status, timeout::text, state FROM queue WHERE ingress_id = %s', id)
        return Row(*rows[0]) if rows else None

    def error(self, id):
        """Return state.dispatch_error of a message; None if it has none."""
        return self.row(id).state.get('dispatch_error')

    def wait_status(self, id, status, timeout_s=15.0):
        """Wait until a message has this status and return its Row."""
        def reached():
            row = self.row(id)
            return row if row and row.status == status else None

        try:
            return wait_until(reached, timeout_s)
        except AssertionError:
            raise AssertionError('message %d is not %s: %s' % (id, status, self.row(id))) from None

    def census(self):
        """Return how many rows there are of each status."""
        return dict(self.execute('SELECT status, count(*) FROM queue GROUP BY status'))

    def wait_census(self, timeout_s=30.0, **expected):
        """Wait until there are exactly so many rows of each status."""
        try:
            wait_until(lambda: self.census() == expected, timeout_s)
        except AssertionError:
            raise AssertionError('waited for %s, there are %s' % (expected, self.census())) from None

    def running(self, stage):
        """Return the ids of the rows that are running at a stage, ascending."""
        return [id for id, in self.execute("SELECT ingress_id FROM queue WHERE status = 'running' AND stage = %s"
                                           ' ORDER BY ingress_id', stage)]

    def counts(self):
        """Return stage_stats as stage -> Counts."""
        return {stage: Counts(*rest) for stage, *rest in
                self.execute('SELECT stage, processed, failed, timeouts, crashes FROM stage_stats')}

    def seconds(self, stage):
        """Return the processing_seconds of a stage."""
        return self.execute('SELECT processing_seconds FROM stage_stats WHERE stage = %s', stage)[0][0]

    def totals(self):
        """Return (stages, messages) of dispatch_stats."""
        [totals] = self.execute('SELECT stages, messages FROM dispatch_stats')
        return totals

    # the execution log

    def events(self, event=None):
        """Return the execution log as [(time, pid, stage, id, event)], in the order of writing; only one kind."""
        if not os.path.exists(self.log):
            return []
        with open(self.log, encoding='utf-8') as file:
            events = [tuple(json.loads(line)) for line in file.read().splitlines()]
        return [e for e in events if event in (None, e[4])]

    def begun(self, stage=None):
        """Return the ids in the order in which their passes began."""
        return [e[3] for e in self.events('begin') if stage in (None, e[2])]

    def wait_begun(self, number, timeout_s=15.0):
        """Wait until so many passes have begun and return their ids in that order."""
        wait_until(lambda: len(self.begun()) >= number, timeout_s, '%d passes' % number)
        return self.begun()


def spawned(running):
    """Return the pids of all workers that a dispatcher has started, from its log."""
    return [int(pid) for pid in re.findall(r'spawned worker (\d+)', running.log())]
